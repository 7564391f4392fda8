"""Two ranks hold one model: each its part, together transformers' logits, and all weights again."""

import subprocess
import sys
from pathlib import Path

import pytest
import tiny_families

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from rlcore.conversion.convert import hf_to_torch_dist  # noqa: E402
from rlcore.models.hf_config import read_hf_config  # noqa: E402
from rlcore.models.megatron_layout import MegatronLayout  # noqa: E402
from rlcore.models.megatron_plan import stage_shares  # noqa: E402

CASES = [
    "qwen3-tensor",
    "glm4-tensor",
    "deepseek_v3-tensor",
    "qwen3-pipeline",
    "glm4_moe-pipeline",
    "qwen3_moe-expert",
]
PLANNED = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "expert": "expert_model_parallel_size",
}
RANK = Path(__file__).with_name("megatron_rank.py")


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of all cases, which two processes have looked at one after another."""
    folder = tmp_path_factory.mktemp("ranks")
    ids = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    for case in CASES:
        own = folder / case
        reference = tiny_families.build(case.rpartition("-")[0], own / "model")
        hf_to_torch_dist(own / "model", own / "dist")
        with torch.no_grad():
            torch.save((ids, reference(ids).logits), own / "expected.pt")
    ranks = [
        subprocess.Popen([sys.executable, RANK, str(rank), folder, *CASES]) for rank in range(2)
    ]
    for rank in ranks:
        rank.wait(300)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one_model(case: str, checked: Path) -> None:
    errors = [path.read_text() for path in sorted((checked / case).glob("error-*"))]
    assert not errors, "\n".join(errors)
    assert len(list((checked / case).glob("done-*"))) == 2, "a case before it failed"


@pytest.mark.parametrize("case", CASES)
def test_the_plan_counts_the_parameters_of_each_rank(case: str, checked: Path) -> None:
    family, _, cut = case.rpartition("-")
    arch = read_hf_config(checked / case / "model")
    layout = MegatronLayout(**{PLANNED[cut]: 2})
    shares = [share.dense + share.expert for share in stage_shares(arch, layout)]
    planned = shares if cut == "pipeline" else shares * 2
    held = [int((checked / case / f"parameters-{rank}").read_text()) for rank in range(2)]
    assert held == planned, family
