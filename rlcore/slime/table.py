"""Every argument of slime, and what becomes of it.

The groups are slime's. Megatron's own options, `--sglang-*` and `--router-*` are not listed one by
one: `translate` knows them by `MEGATRON` and by their prefixes.
"""

from rlcore.slime import convert
from rlcore.slime.rules import Argument, Held, Joined, Refused, Setting, flag

MOVES_WITH_MEGATRON = "the Megatron backend does not have it yet"
APART = "nothing moves without `--colocate`"
NO_SERVER = "the Megatron teacher server is a program of slime's own; there is none here"

CLUSTER = (
    Argument("actor-num-nodes", "int", Setting("cluster.actor_num_nodes")),
    Argument("actor-num-gpus-per-node", "int", Setting("cluster.actor_num_gpus_per_node")),
    Argument(
        "rollout-num-gpus",
        "int",
        Joined("cluster.rollout_num_gpus", "default with --colocate: the trainer's GPUs"),
    ),
    Argument("rollout-num-gpus-per-engine", "int", Setting("cluster.rollout_num_gpus_per_engine")),
    Argument("num-gpus-per-node", "int", Held("Ray knows how many GPUs a node has")),
    flag("colocate", Joined("cluster.colocate")),
    flag("offload", Joined("cluster.offload_train cluster.offload_rollout", APART)),
    Argument("offload-train", "switch", Joined("cluster.offload_train", APART)),
    Argument("offload-rollout", "switch", Joined("cluster.offload_rollout", APART)),
    Argument(
        "distributed-backend",
        "str",
        Held("NCCL between GPUs, Gloo between CPUs", ("nccl",)),
    ),
    Argument("distributed-timeout-minutes", "int", Setting("train.deadline_s", convert.minutes)),
    flag("use-fault-tolerance", Held("engines and trainers are always watched and brought back")),
    Argument("rollout-health-check-interval", "float", Setting("rollout.health_check_interval_s")),
    Argument("rollout-health-check-timeout", "float", Setting("rollout.health_check_timeout_s")),
    Argument(
        "rollout-health-check-first-wait",
        "float",
        Held("an engine is watched once it has answered; rollout.start_timeout_s is its time"),
    ),
)

TRAIN = (
    Argument("train-backend", "str", Joined("train.backend")),
    Argument("qwen-gdn-backend", "str", Refused(MOVES_WITH_MEGATRON)),
    Argument(
        "train-env-vars",
        "json",
        Refused("actors inherit the environment of their Ray node: set the variables there"),
    ),
    Argument(
        "update-weight-mode",
        "str",
        Joined("weights.transport", "`delta` with `--update-weight-transport disk`"),
    ),
    Argument(
        "update-weight-transport",
        "str",
        Joined("weights.transport", "`nccl` is `tensor` with `--colocate`, else `distributed`"),
    ),
    flag("release-train", Refused("trainers stay; a killed one comes back from its saved state")),
    Argument(
        "update-weight-disk-dir",
        "str",
        Held("weights that travel by disk lie in the run's folder below storage.root"),
    ),
    flag(
        "update-weight-disk-keep-files",
        Refused("weights are removed once they arrived; checkpoint.save_interval = 1 keeps all"),
    ),
    Argument(
        "update-weight-delta-encoding",
        "str",
        Held("differences of bits at their places, half the size of an XOR"),
    ),
    Argument("update-weight-delta-checksum", "str", Held("SHA-256 of every tensor")),
    Argument(
        "custom-update-weight-post-write-path",
        "str",
        Setting("weights.custom_update_weight_post_write_path"),
    ),
    Argument(
        "update-weight-local-checkpoint-dir",
        "str",
        Held("an engine's copy lies in its scratch folder, or the run's on a local store"),
    ),
    Argument("custom-model-provider-path", "str", Refused(MOVES_WITH_MEGATRON)),
    flag(
        "recompute-loss-function",
        Held("log-probs and their gradients are computed in chunks, without keeping logits"),
    ),
    Argument("log-probs-chunk-size", "int", Held("chunks of 128 MiB of logits")),
    Argument(
        "only-train-params-name-list", "strs", Refused("all parameters are trained; none is frozen")
    ),
    Argument(
        "freeze-params-name-list", "strs", Refused("all parameters are trained; none is frozen")
    ),
    flag("freeze-indexer", Refused(MOVES_WITH_MEGATRON)),
    flag("allgather-cp", Refused(MOVES_WITH_MEGATRON)),
    Argument("seed", "int", Held("the trainer draws nothing at random; run.seed seeds the rest")),
    Argument("clip-grad", "float", Setting("train.clip_grad")),
    Argument("lr", "float", Setting("train.lr")),
    Argument("optimizer", "str", Held("AdamW", ("adam", "adamw"))),
    Argument("lr-warmup-init", "float", Held("the warm-up begins at 0", (0.0,))),
    Argument("min-lr", "float", Setting("train.lr_min")),
    Argument("lr-decay-style", "str", Setting("train.lr_schedule", convert.schedule)),
    Argument(
        "lr-decay-iters", "int", Refused("the schedule ends with the run: train.num_iterations")
    ),
    Argument("lr-warmup-iters", "int", Setting("train.lr_warmup_steps")),
    Argument(
        "lr-warmup-fraction", "float", Joined("train.lr_warmup_steps", "a share of all steps")
    ),
    Argument("warmup-ratio", "float", Joined("train.lr_warmup_steps", "a share of all steps")),
    Argument(
        "lr-wsd-decay-iters", "int", Refused("train.lr_schedule has constant, linear and cosine")
    ),
    Argument(
        "lr-wsd-decay-style", "str", Refused("train.lr_schedule has constant, linear and cosine")
    ),
    flag("use-checkpoint-lr-scheduler", Held("a resumed run goes on with its own schedule")),
    flag(
        "override-lr-scheduler",
        Refused(
            "make a run of its own with another schedule: `sluice fork RUN --set train.lr=...`"
        ),
    ),
    Argument("weight-decay", "float", Setting("train.weight_decay")),
    Argument("adam-beta1", "float", Setting("train.adam_beta1")),
    Argument("adam-beta2", "float", Setting("train.adam_beta2")),
    Argument("adam-eps", "float", Setting("train.adam_eps")),
    Argument(
        "attn-implementation",
        "str",
        Held("the trainer chooses the attention for packed sequences by the device"),
    ),
    flag("gradient-checkpointing", Setting("train.gradient_checkpointing")),
    flag("bf16", Joined("train.precision", "bfloat16")),
    flag("fp16", Refused("train.precision has float32 and bfloat16")),
    flag("fsdp-state-dict-cpu-offload", Held("states are saved shard by shard")),
    flag("fsdp-cpu-offload", Refused("parameters stay on the device")),
    Argument("fsdp-cpu-backend", "str", Held("Gloo", ("gloo",))),
    flag("deterministic-mode", Setting("train.deterministic")),
    flag("reset-optimizer-states", Refused("the optimizer's moments go on from batch to batch")),
    flag("use-stateless-adam", Refused("the optimizer's moments go on from batch to batch")),
    flag("use-gated-attention", Refused(MOVES_WITH_MEGATRON)),
    Argument("mtp-num-layers", "int", Refused(MOVES_WITH_MEGATRON)),
    Argument("mtp-loss-scaling-factor", "float", Refused(MOVES_WITH_MEGATRON)),
    flag("enable-mtp-training", Refused(MOVES_WITH_MEGATRON)),
    Argument("custom-megatron-init-path", "str", Setting("train.custom_megatron_init_path")),
    Argument(
        "custom-megatron-before-log-prob-hook-path",
        "str",
        Setting("train.custom_megatron_before_log_prob_hook_path"),
    ),
    Argument(
        "custom-megatron-before-train-step-hook-path",
        "str",
        Setting("train.custom_megatron_before_train_step_hook_path"),
    ),
    Argument("megatron-deepgemm-forward-layers", "ints", Refused(MOVES_WITH_MEGATRON)),
    Argument("megatron-deepgemm-forward-modules", "strs", Refused(MOVES_WITH_MEGATRON)),
    Argument("megatron-deepgemm-moe-forward-layers", "ints", Refused(MOVES_WITH_MEGATRON)),
    Argument("megatron-deepgemm-moe-forward-modules", "strs", Refused(MOVES_WITH_MEGATRON)),
    Argument("padded-vocab-size", "int", Held("read from the model's config.json")),
)

MODEL = (
    Argument("hf-checkpoint", "str", Setting("model.path")),
    Argument("model-name", "str", Held("the model's config.json says what it is")),
    Argument("ref-load", "str", Held("the reference begins as the starting model")),
    Argument("ref-ckpt-step", "int", Refused("the reference is the starting model")),
    Argument("load", "str", Joined("storage.root", "the same folder as --save: a run resumes")),
    Argument("save", "str", Joined("storage.root")),
    Argument("save-interval", "int", Setting("checkpoint.save_interval")),
    flag("async-save", Refused("a state is saved before its stage is committed, never after")),
    flag("no-save-optim", Refused("a state without its optimizer could not be resumed")),
    Argument("save-hf", "str", Held("checkpoints are Hugging Face folders in the run's folder")),
)

DATA = (
    Argument("prompt-data", "str", Setting("data.path")),
    Argument("input-key", "str", Setting("data.input_key")),
    Argument("label-key", "str", Setting("data.label_key")),
    Argument("metadata-key", "str", Setting("data.metadata_key")),
    Argument("tool-key", "str", Setting("data.tool_key")),
    Argument("multimodal-keys", "json", Setting("data.multimodal_keys", convert.scalars)),
    flag("apply-chat-template", Setting("data.apply_chat_template")),
    Argument(
        "apply-chat-template-kwargs",
        "json",
        Setting("data.apply_chat_template_kwargs", convert.scalars),
    ),
    Argument("num-rollout", "int", Setting("train.num_iterations")),
    Argument(
        "num-epoch",
        "int",
        Refused("give --num-rollout: rows // rollout-batch-size x epochs; `data` may repeat"),
    ),
    flag(
        "disable-rollout-global-dataset",
        Refused("prompts come from data.path, whose cursor is what makes a run resumable"),
    ),
    Argument("data-source-path", "str", Joined("rollout.data_source_path")),
    Argument(
        "start-rollout-id",
        "int",
        Refused("a run goes on after its last committed iteration; `sluice fork` after another"),
    ),
    Argument("rollout-batch-size", "int", Setting("rollout.rollout_batch_size")),
    Argument("n-samples-per-prompt", "int", Setting("rollout.n_samples_per_prompt")),
    Argument("global-batch-size", "int", Joined("train.global_batch_size")),
    Argument("num-steps-per-rollout", "int", Joined("train.num_steps_per_rollout")),
    Argument(
        "micro-batch-size", "int", Held("micro-batches are packed by train.max_tokens_per_gpu")
    ),
    flag("balance-data", Held("micro-batches are dealt to ranks by their FLOPs")),
    flag("balance-by-flops", Held("micro-batches are dealt to ranks by their FLOPs")),
    flag("use-dynamic-batch-size", Held("micro-batches are packed by train.max_tokens_per_gpu")),
    Argument("max-tokens-per-gpu", "int", Setting("train.max_tokens_per_gpu")),
    Argument(
        "log-probs-max-tokens-per-gpu", "int", Held("forward passes use train.max_tokens_per_gpu")
    ),
)

ROLLOUT = (
    Argument(
        "rollout-function-path",
        "str",
        Joined(
            "rollout.custom_rollout_function_path",
            "slime's `sft_rollout` and `fully_async_rollout` are `run.mode`",
        ),
    ),
    Argument("rollout-temperature", "float", Setting("rollout.temperature")),
    Argument("rollout-top-p", "float", Setting("rollout.top_p")),
    Argument("rollout-top-k", "int", Setting("rollout.top_k")),
    Argument("rollout-max-context-len", "int", Setting("rollout.context_length")),
    Argument("rollout-max-prompt-len", "int", Setting("data.max_prompt_len")),
    Argument("rollout-max-response-len", "int", Setting("rollout.max_response_len")),
    flag("rollout-skip-special-tokens", Setting("rollout.skip_special_tokens")),
    Argument("rollout-stop", "strs", Setting("rollout.stop")),
    Argument("rollout-stop-token-ids", "ints", Setting("rollout.stop_token_ids")),
    flag("rollout-shuffle", Setting("data.shuffle")),
    Argument("rollout-seed", "int", Setting("run.seed")),
    Argument("over-sampling-batch-size", "int", Joined("rollout.over_sampling_batch_size")),
    Argument(
        "dynamic-sampling-filter-path",
        "str",
        Setting("filter.dynamic_sampling_filter_path", convert.dynamic_filter),
    ),
    flag("partial-rollout", Setting("rollout.partial_rollout")),
    flag("mask-offpolicy-in-partial-rollout", Setting("rollout.mask_offpolicy_in_partial_rollout")),
    Argument(
        "custom-generate-function-path",
        "str",
        Joined(
            "rollout.custom_generate_function_path",
            "slime's own `generate_streaming` is left out: what is cut off keeps its tokens anyway",
        ),
    ),
    Argument("rollout-sample-hook-path", "again", Setting("rollout.sample_hook_paths")),
    Argument(
        "custom-rollout-log-function-path",
        "str",
        Refused("metrics are stored as they are; `sluice sql` computes others from the samples"),
    ),
    Argument(
        "custom-eval-rollout-log-function-path",
        "str",
        Refused("metrics are stored as they are; `sluice sql` computes others from the samples"),
    ),
    Argument("buffer-filter-path", "str", Setting("rollout.buffer_filter_path")),
    Argument("update-weight-buffer-size", "int", Setting("weights.update_weight_buffer_size")),
    Argument(
        "update-weights-interval",
        "int",
        Joined("rollout.update_weights_interval", "with `train_async.py` alone, as in slime"),
    ),
    flag("keep-old-actor", Refused("old log-probs come from the policy before the step")),
    Argument(
        "rollout-data-postprocess-path",
        "str",
        Refused("what is trained on is what is committed; set loss_mask in a generate function"),
    ),
    Argument("rollout-data-transport", "str", Held("batches travel through the store")),
    Argument(
        "rollout-external-engine-addrs", "strs", Setting("rollout.engine_urls", convert.engine_urls)
    ),
    Argument("rollout-buffer-url", "str", Refused("the buffer is in the rollout's manifest")),
    Argument("fetch-trajectory-retry-times", "int", Refused("there is no external buffer")),
    Argument("min-batch-collection-ratio", "float", Refused("there is no external buffer")),
    Argument("rollout-task-type", "str", Refused("there is no external buffer")),
    Argument(
        "loss-mask-type",
        "str",
        Held("the trained tokens of a conversation are found by whatever chat template it has"),
    ),
    Argument("data-pad-size-multiplier", "int", Held("packed sequences need no padding")),
    Argument("rollout-sample-filter-path", "str", Setting("rollout.rollout_sample_filter_path")),
    Argument(
        "rollout-all-samples-process-path",
        "str",
        Setting("rollout.rollout_all_samples_process_path"),
    ),
)

EVAL = (
    Argument("eval-interval", "int", Joined("eval.eval_interval")),
    Argument("eval-prompt-data", "strs", Joined("eval.datasets", "pairs of name and path")),
    Argument("eval-config", "str", Setting("eval.eval_config")),
    Argument("eval-function-path", "str", Joined("eval.eval_function_path")),
    flag("skip-eval-before-train", Held("the first evaluation is after eval.eval_interval")),
    Argument("eval-input-key", "str", Joined("eval.datasets.input_key")),
    Argument("eval-label-key", "str", Joined("eval.datasets.label_key")),
    Argument("eval-tool-key", "str", Joined("eval.datasets.tool_key")),
    Argument("n-samples-per-eval-prompt", "int", Joined("eval.datasets.n_samples_per_eval_prompt")),
    Argument("eval-temperature", "float", Joined("eval.datasets.temperature")),
    Argument("eval-top-p", "float", Joined("eval.datasets.top_p")),
    Argument("eval-top-k", "int", Joined("eval.datasets.top_k")),
    Argument("eval-max-response-len", "int", Joined("eval.datasets.max_response_len")),
    Argument("eval-max-prompt-len", "int", Joined("eval.datasets.max_prompt_len")),
    Argument("eval-min-new-tokens", "int", Joined("eval.datasets.min_new_tokens")),
    Argument("eval-max-context-len", "int", Refused("rollout.context_length is for both")),
    Argument("eval-reward-key", "str", Setting("eval.reward_key")),
)

ALGORITHM = (
    Argument("advantage-estimator", "str", Setting("algorithm.advantage_estimator")),
    Argument("eps-clip", "float", Joined("algorithm.clip_low algorithm.clip_high")),
    Argument("eps-clip-high", "float", Joined("algorithm.clip_high")),
    Argument("eps-clip-c", "float", Setting("algorithm.eps_clip_c")),
    Argument("value-clip", "float", Setting("algorithm.value_clip")),
    Argument("num-critic-only-steps", "int", Setting("algorithm.num_critic_only_steps")),
    Argument("megatron-config-path", "str", Refused(MOVES_WITH_MEGATRON)),
    Argument("kl-coef", "float", Setting("algorithm.kl_coef")),
    Argument(
        "loss-type",
        "str",
        Joined(
            "algorithm.loss_type",
            "`custom_loss` is the function of `--custom-loss-function-path`",
        ),
    ),
    Argument(
        "custom-loss-function-path",
        "str",
        Joined("algorithm.custom_loss_function_path", "with `--loss-type custom_loss`, as there"),
    ),
    Argument("kl-loss-type", "str", Setting("algorithm.kl_loss_type")),
    flag(
        "disable-compute-advantages-and-returns",
        Setting("algorithm.loss_type", convert.without_advantages),
    ),
    Argument(
        "custom-advantage-function-path",
        "str",
        Setting("algorithm.custom_advantage_function_path"),
    ),
    flag("use-kl-loss", Setting("algorithm.use_kl_loss")),
    Argument("kl-loss-coef", "float", Setting("algorithm.kl_loss_coef")),
    flag("use-unbiased-kl", Setting("algorithm.use_unbiased_kl")),
    Argument("ref-update-interval", "int", Setting("algorithm.ref_update_interval")),
    Argument("entropy-coef", "float", Setting("algorithm.entropy_coef")),
    Argument("gamma", "float", Setting("algorithm.gamma")),
    Argument("lambd", "float", Setting("algorithm.lambd")),
    flag("normalize-advantages", Setting("algorithm.normalize_advantages")),
    flag(
        "disable-grpo-std-normalization",
        Setting("algorithm.grpo_std_normalization", convert.negated),
    ),
    flag(
        "disable-rewards-normalization", Setting("algorithm.rewards_normalization", convert.negated)
    ),
    flag("use-rollout-entropy", Held("entropies are among the metrics of training")),
    flag("get-mismatch-metrics", Held("the log-prob gap of engine and trainer is a metric")),
    flag("use-rollout-logprobs", Setting("algorithm.use_rollout_logprobs")),
    flag("use-tis", Setting("algorithm.use_tis")),
    Argument("tis-clip", "float", Setting("algorithm.tis_clip")),
    Argument("tis-clip-low", "float", Setting("algorithm.tis_clip_low")),
    Argument(
        "custom-tis-function-path",
        "str",
        Joined(
            "algorithm.custom_tis_function_path",
            'slime\'s own `icepop_function` is `algorithm.tis_mode = "mask"`',
        ),
    ),
    Argument(
        "custom-pg-loss-reducer-function-path",
        "str",
        Setting("algorithm.custom_pg_loss_reducer_function_path"),
    ),
    flag("calculate-per-token-loss", Joined("algorithm.loss_aggregation")),
    flag("use-routing-replay", Setting("train.use_routing_replay")),
    flag("use-rollout-routing-replay", Setting("rollout.use_rollout_routing_replay")),
    flag("use-opsm", Setting("algorithm.use_opsm")),
    Argument("opsm-delta", "float", Setting("algorithm.opsm_delta")),
    flag("use-opd", Setting("algorithm.use_opd")),
    Argument(
        "opd-type",
        "str",
        Held(
            "the trainer holds the teacher; one on a server is `rollout.teacher_url`", ("megatron",)
        ),
    ),
    Argument("opd-kl-coef", "float", Setting("algorithm.opd_kl_coef")),
    Argument("opd-teacher-load", "str", Setting("algorithm.opd_teacher_load")),
    Argument(
        "opd-teacher-ckpt-step",
        "int",
        Refused("the teacher is a Hugging Face folder, which has no steps"),
    ),
    flag("true-on-policy-mode", Setting("algorithm.true_on_policy_mode")),
)

REWARD = (
    Argument("rm-type", "str", Joined("reward.rm_type")),
    Argument("reward-key", "str", Setting("reward.reward_key")),
    flag("group-rm", Setting("reward.batched")),
    Argument("rm-url", "str", Setting("reward.rm_url")),
    Argument("custom-rm-path", "str", Joined("reward.custom_rm_path")),
    Argument(
        "custom-reward-post-process-path",
        "str",
        Setting("algorithm.custom_reward_post_process_path"),
    ),
    Argument(
        "custom-convert-samples-to-train-data-path",
        "str",
        Setting("algorithm.custom_convert_samples_to_train_data_path"),
    ),
)

IN_STORE = (
    "every iteration's samples and figures are in the store; `sluice show`, `samples` and `sql` "
    "read them"
)
LOGGERS = (
    flag("use-wandb", Setting("tracking.wandb")),
    Argument("wandb-mode", "str", Setting("tracking.wandb_mode")),
    Argument("wandb-dir", "str", Setting("tracking.wandb_dir")),
    Argument(
        "wandb-key",
        "str",
        Refused("a configuration is stored and shown as it is: put the key into WANDB_API_KEY"),
    ),
    Argument("wandb-host", "str", Setting("tracking.wandb_host")),
    Argument("wandb-team", "str", Setting("tracking.wandb_entity")),
    Argument("wandb-group", "str", Setting("tracking.wandb_group")),
    Argument("wandb-project", "str", Setting("tracking.wandb_project")),
    Argument("wandb-run-id", "str", Setting("tracking.wandb_run_id")),
    flag("disable-wandb-random-suffix", Held("nothing is added to the name of a group or run")),
    flag("wandb-always-use-train-step", Refused("the step of every tracker is the iteration")),
    flag("log-multi-turn", Held("multi_turn/* is among the metrics where there are turns")),
    flag("log-passrate", Held("pass@k is among the metrics of rollout and evaluation")),
    Argument("log-reward-category", "str", Held(IN_STORE)),
    flag("log-correct-samples", Held(IN_STORE)),
    flag("use-tensorboard", Setting("tracking.tensorboard")),
    Argument("tb-project-name", "str", Setting("tracking.tensorboard_dir")),
    Argument("tb-experiment-name", "str", Setting("run.id")),
)

RERUN = (
    "whole batches of a stored run are trained on by run.train_from, and one of them again by "
    "`sluice rerun RUN --iter N --stage train`"
)
DEBUG = (
    Argument("save-debug-rollout-data", "str", Held(IN_STORE)),
    Argument("load-debug-rollout-data", "str", Setting("run.train_from", convert.stored_run)),
    Argument("load-forge-rollout-data", "str", Refused(RERUN)),
    Argument("load-debug-rollout-data-subsample", "float", Refused(RERUN)),
    Argument("save-debug-train-data", "str", Held(IN_STORE)),
    Argument("dump-details", "str", Held(IN_STORE)),
    flag("debug-rollout-only", Setting("run.mode", convert.rollout_only)),
    flag("debug-train-only", Setting("run.mode", convert.train_only)),
    Argument("memory-snapshot-dir", "str", Refused("attach a profiler to the trainer's process")),
    Argument(
        "memory-snapshot-num-steps", "int", Refused("attach a profiler to the trainer's process")
    ),
    Argument("profile-target", "strs", Refused("attach a profiler to the trainer's process")),
    Argument("memory-recorder", "str", Refused("attach a profiler to the trainer's process")),
    flag("record-memory-history", Refused("attach a profiler to the trainer's process")),
    flag("check-weight-update-equal", Held("every sync is proved by weights.canary_prompts")),
    Argument("http-proxy", "str", Refused("engines listen on loopback; no proxy is used")),
    flag("use-distributed-post", Held("one worker keeps all engines busy; it is not the limit")),
    flag("ci-test", Refused("it belongs to slime's own tests")),
    flag("ci-disable-kl-checker", Refused("it belongs to slime's own tests")),
    Argument(
        "ci-train-rollout-logprob-abs-diff-threshold",
        "float",
        Setting("algorithm.max_logprob_gap"),
    ),
    Argument("ci-save-grad-norm", "str", Refused("it belongs to slime's own tests")),
    Argument("ci-load-grad-norm", "str", Refused("it belongs to slime's own tests")),
    Argument(
        "custom-config-path",
        "str",
        Refused("write its values into the configuration; those of a plugin into [compat.args]"),
    ),
    Argument("config", "str", Refused("write its values into the configuration")),
)

SGLANG = (
    Argument("sglang-router-ip", "str", Joined("rollout.sglang_router_url", "one that runs")),
    Argument("sglang-router-port", "int", Joined("rollout.sglang_router_url", "one that runs")),
    Argument(
        "sglang-router-request-timeout-secs", "int", Setting("rollout.request_timeout_s", float)
    ),
    Argument("sglang-server-concurrency", "int", Setting("rollout.concurrency")),
    Argument("prefill-num-servers", "int", Refused("prefill and decode share an engine")),
    Argument("sglang-config", "str", Refused("all engines are alike: [sglang] is for all")),
)

TEACHER = (
    Argument("teacher-port", "int", Refused(NO_SERVER)),
    Argument("teacher-warmup-port", "int", Refused(NO_SERVER)),
    Argument("teacher-warmup-timeout-s", "int", Refused(NO_SERVER)),
    Argument("teacher-sample-reduction-chunk-size", "int", Refused(NO_SERVER)),
    Argument("teacher-label-reduction-chunk-size", "int", Refused(NO_SERVER)),
    Argument("megatron-server-max-length", "int", Refused(NO_SERVER)),
    Argument("megatron-server-update-timeout-s", "float", Refused(NO_SERVER)),
    Argument("megatron-server-warmup", "switch", Refused(NO_SERVER)),
)

GROUPS: dict[str, tuple[Argument, ...]] = {
    "Cluster": CLUSTER,
    "Trainer": TRAIN,
    "Model and checkpoints": MODEL,
    "Data": DATA,
    "Rollout": ROLLOUT,
    "Evaluation": EVAL,
    "Algorithm": ALGORITHM,
    "Reward": REWARD,
    "Loggers": LOGGERS,
    "Debugging": DEBUG,
    "SGLang": SGLANG,
    "Teacher server": TEACHER,
}
BY_NAME = {argument.name: argument for group in GROUPS.values() for argument in group}
