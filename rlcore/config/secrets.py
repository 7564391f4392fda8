"""What would be a secret in a configuration, which is stored and shown as it is."""

import re
from urllib.parse import urlsplit

SECRET_WORDS = frozenset(
    {"key", "secret", "token", "password", "passwd", "credential", "credentials", "sig"}
)


def names_a_secret(name: str) -> bool:
    """Whether a free argument of that name holds a secret, as `key`, `aws_session_token` do."""
    words = [word for word in re.split(r"[^a-z]+", name.lower()) if word]
    if words[-2:] == ["connection", "string"]:
        return True
    return bool(words) and (words[-1] in SECRET_WORDS or "secret" in words or "password" in words)


def check_no_login(setting: str, url: str) -> None:
    """See that an address holds neither user and password nor a key in its query.

    Raises:
        ValueError: it does; the value is not shown.
    """
    parts = urlsplit(url)
    names = [pair.partition("=")[0] for pair in parts.query.split("&")]
    if "@" in parts.netloc or any(map(names_a_secret, names)):
        raise ValueError(
            f"{setting} holds a password or key, and a configuration is stored and shown as it is; "
            "put it into the environment, or let a proxy on this machine add it"
        )
