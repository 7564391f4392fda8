"""The sections `rollout` and `filter`: how responses are generated, and which are trained on."""

# pydantic copies defaults, which ruff does not know of a section's base in another file.
# ruff: noqa: RUF012

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlcore.config.secrets import check_no_login
from rlcore.config.section import FilePath, FunctionPath, PositiveInt, Section, StopText, Url


class RolloutConfig(Section):
    """How responses are generated."""

    OPERATIONAL = frozenset(
        {
            "concurrency",
            "request_timeout_s",
            "request_retries",
            "start_timeout_s",
            "health_check_interval_s",
            "health_check_timeout_s",
            "num_engines",
            "engine_urls",
            "use_sglang_router",
            "sglang_router_url",
            "max_refills",
        }
    )

    engine: Literal["embedded", "sglang"] = "embedded"
    """`embedded` runs on CPU inside this package; `sglang` needs a GPU."""
    hf_checkpoint: FilePath | None = None
    """Folder of the same model in fp8 blocks, which engines start from and get weights as."""
    rollout_batch_size: PositiveInt = 32
    """Prompts an iteration."""
    n_samples_per_prompt: PositiveInt = 8
    """Responses a prompt: the size of a group."""
    max_response_len: PositiveInt = 1024
    """Most tokens of a response."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; the trainer divides its logits by it too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample among the k likeliest tokens; -1 is off."""
    stop: list[StopText] = []
    """Strings that end a response."""
    stop_token_ids: list[int] = []
    """Token ids that end a response, beside the end-of-sequence id."""
    skip_special_tokens: bool = False
    """Leave special tokens out of the response text."""
    context_length: PositiveInt | None = None
    """Longest prompt plus response of the engine; default: the model's."""
    custom_generate_function_path: FunctionPath | None = None
    """A function `async generate(args, sample, sampling_params)` in place of one request."""
    teacher_url: Annotated[Url, Field(pattern=r"^https?://")] | None = None
    """SGLang server of the teacher of on-policy distillation, which scores each response."""
    group_generate: bool = False
    """That function takes the samples of a group, and a list of parameters, one a sample."""
    custom_rollout_function_path: FunctionPath | None = None
    """A function `rollout(args, rollout_id, data_source)` that makes the whole batch."""
    data_source_path: FunctionPath | None = None
    """A class that chooses the prompts, in place of the order of data.path: a curriculum."""
    buffer_filter_path: FunctionPath | None = None
    """A function `(args, rollout_id, buffer, num_samples)` that picks from what was left over."""
    sample_hook_paths: list[FunctionPath] = []
    """Functions `(args, sample, *, rollout_id, evaluation)` for each sample before its reward."""
    rollout_sample_filter_path: FunctionPath | None = None
    """A function `(args, groups)` that marks samples of a scored batch as `remove_sample`."""
    rollout_all_samples_process_path: FunctionPath | None = None
    """A function `(args, all_groups, data_source)` that looks at all scored groups."""
    over_sampling_batch_size: PositiveInt | None = None
    """Prompts begun at a time; the first rollout_batch_size to finish are used. None: no more."""
    max_refills: Annotated[int, Field(ge=0)] = 16
    """How often over_sampling_batch_size more are begun for a batch while the filter drops."""
    partial_rollout: bool = False
    """Keep what over-sampling began and did not use, and go on with it in the next iteration."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Do not train on tokens of older policies; kept groups that were whole are begun anew."""
    async_buffer_size: PositiveInt = 1
    """Rollouts, or their worth of groups, that the modes `async` and `fully-async` are ahead."""
    update_weights_interval: PositiveInt = 1
    """Iterations between two weight syncs in those modes."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Most iterations that the policy of any token may lie behind; default: as the mode needs."""
    use_rollout_routing_replay: bool = False
    """Engines say which experts each token was sent to, and the trainer sends it to the same."""
    num_engines: PositiveInt | None = None
    """Engines to run; default: cluster.rollout_num_gpus / cluster.rollout_num_gpus_per_engine."""
    engine_urls: list[Annotated[Url, Field(pattern=r"^https?://")]] = []
    """Servers that run already, in place of engines that the run starts; they get its weights."""
    use_sglang_router: bool = False
    """Start a router, which chooses engines; else requests go to the least loaded one."""
    sglang_router_url: Annotated[Url, Field(pattern=r"^https?://")] | None = None
    """A router that runs already, in place of one that the run starts."""
    max_running_requests: PositiveInt | None = None
    """Requests an engine works on at once; default: the engine's own choice."""
    concurrency: PositiveInt = 512
    """Samples in flight at an engine at once."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after which a request to an engine is given up and tried elsewhere."""
    request_retries: Annotated[int, Field(ge=0)] = 3
    """How often a failed request is sent again."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds an engine may take to answer its first health check."""
    health_check_interval_s: Annotated[float, Field(gt=0)] = 1.0
    """Seconds between two looks at the engines; one that has died is started again."""
    health_check_timeout_s: Annotated[float, Field(gt=0)] = 15.0
    """Seconds without an answer after which an engine counts as hung and is started again."""

    @model_validator(mode="after")
    def _greedy_has_no_groups(self) -> "RolloutConfig":
        for said, greedy, mend in (
            ("temperature = 0", self.temperature == 0, "a temperature above 0"),
            ("top_k = 1", self.top_k == 1, "-1 (off) or 2 and up"),
        ):
            if greedy and self.n_samples_per_prompt > 1:
                raise ValueError(
                    f"rollout.{said} gives the same response n_samples_per_prompt "
                    f"= {self.n_samples_per_prompt} times; use {mend}"
                )
        return self

    @model_validator(mode="after")
    def _over_sampling_adds_up(self) -> "RolloutConfig":
        begun = self.over_sampling_batch_size
        if begun is not None and begun < self.rollout_batch_size:
            raise ValueError(
                f"rollout.over_sampling_batch_size = {begun} is less than "
                f"rollout.rollout_batch_size = {self.rollout_batch_size}: an iteration could not "
                "be filled; make it larger, or leave it out"
            )
        if self.mask_offpolicy_in_partial_rollout and not self.partial_rollout:
            raise ValueError(
                "rollout.mask_offpolicy_in_partial_rollout = true needs rollout.partial_rollout "
                "= true: without it no sample has tokens of an older policy"
            )
        return self

    @model_validator(mode="after")
    def _servers_have_no_login(self) -> "RolloutConfig":
        check_no_login("rollout.teacher_url", self.teacher_url or "")
        check_no_login("rollout.sglang_router_url", self.sglang_router_url or "")
        for url in self.engine_urls:
            check_no_login("rollout.engine_urls", url)
        if self.use_sglang_router and self.sglang_router_url is not None:
            raise ValueError(
                "rollout.use_sglang_router = true starts a router, and rollout.sglang_router_url = "
                f"{self.sglang_router_url!r} names one that runs already; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _functions_agree(self) -> "RolloutConfig":
        if self.group_generate and self.custom_generate_function_path is None:
            raise ValueError(
                "rollout.group_generate = true is about a function of yours; set "
                "rollout.custom_generate_function_path"
            )
        whole = "rollout.custom_rollout_function_path makes the whole batch itself; remove"
        if self.custom_rollout_function_path is None:
            return self
        if self.over_sampling_batch_size is not None:
            raise ValueError(f"{whole} rollout.over_sampling_batch_size")
        for name in ("rollout_sample_filter_path", "rollout_all_samples_process_path"):
            if getattr(self, name) is not None:
                raise ValueError(f"{whole} rollout.{name}")
        return self

    @model_validator(mode="after")
    def _limits_agree(self) -> "RolloutConfig":
        if self.top_k == 0:
            raise ValueError(
                "rollout.top_k = 0 leaves no token to sample; use -1 (off) or 1 and up"
            )
        return self


class FilterConfig(Section):
    """Which groups are trained on."""

    dynamic_sampling_filter_path: (
        FunctionPath | Literal["nonzero_std", "nonzero_std_with_fallback"] | None
    ) = None
    """`nonzero_std` drops groups of equal rewards; or `filter(args, samples, **kwargs) -> bool`."""
