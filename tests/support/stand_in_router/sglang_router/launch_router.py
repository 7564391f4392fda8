"""Spreads requests in turn over servers.

Like the real one it knows single requests alone: a list of sampling parameters or prompts is
refused, as is a server that is on the list already.
"""

import argparse
import itertools
from collections import Counter
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

SINGLE = {"sampling_params": dict, "input_ids": list, "rid": str}


def make(workers: list[str]) -> FastAPI:
    """The application."""
    app = FastAPI()
    turns = itertools.count()
    served = Counter[str]()
    http = httpx.AsyncClient(timeout=None, trust_env=False)

    @app.get("/health")
    async def health() -> str:
        return "OK"

    @app.get("/workers")
    async def listed() -> dict[str, Any]:
        return {"workers": [{"url": url, "served": served[url]} for url in workers]}

    @app.post("/workers")
    async def add(request: Request) -> Response:
        url = (await request.json())["url"]
        if url in workers:
            return JSONResponse({"error": f"{url} is there"}, 409)
        workers.append(url)
        return JSONResponse({"status": "accepted"}, 202)

    @app.delete("/workers/{url:path}")
    async def remove(url: str) -> Response:
        if url not in workers:
            return JSONResponse({"error": f"no {url}"}, 404)
        workers.remove(url)
        return JSONResponse({"status": "accepted"}, 202)

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        body = await request.json()
        wrong = [k for k, kind in SINGLE.items() if k in body and not isinstance(body[k], kind)]
        if wrong or any(isinstance(one, list) for one in body["input_ids"]):
            return JSONResponse({"error": f"invalid type: {wrong or 'input_ids'}"}, 422)
        url = workers[next(turns) % len(workers)]
        served[url] += 1
        try:
            reply = await http.post(f"{url}/generate", json=body)
        except httpx.HTTPError as error:
            return JSONResponse({"error": repr(error)}, 503)
        return Response(reply.content, reply.status_code, media_type="application/json")

    return app


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--worker-urls", nargs="*", default=[])
    parser.add_argument("--request-timeout-secs", type=int)
    parser.add_argument("--disable-retries", action="store_true")
    parser.add_argument("--disable-circuit-breaker", action="store_true")
    args = parser.parse_args()
    uvicorn.run(make(args.worker_urls), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
