"""Launch lines of slime: every argument becomes something, and what it becomes is right."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from flows.commands.slime import lines
from rlcore.config import RunConfig, build_config, load_config
from rlcore.config.load import resolve_paths
from rlcore.errors import ConfigError
from rlcore.slime.compat.attributes import slime_args
from rlcore.slime.megatron import OPTIONS
from rlcore.slime.rules import Joined, Setting
from rlcore.slime.table import BY_NAME, GROUPS
from rlcore.slime.translate import translate

NAMES = Path(__file__).with_name("arguments.txt").read_text().split()
SHORTEST = (
    "--hf-checkpoint /m --prompt-data /p.jsonl --num-rollout 7 --rollout-batch-size 4 "
    "--n-samples-per-prompt 8 --rollout-max-response-len 64 --custom-rm-path rm.py:f "
    "--rollout-num-gpus 2"
)
QWEN3 = (
    "--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --use-rotary-position-embeddings "
    "--disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 "
    "--vocab-size 151936 --kv-channels 128 --qk-layernorm"
)
PERFORMANCE = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 "
    "--context-parallel-size 1 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--use-dynamic-batch-size --max-tokens-per-gpu 9216 --attention-dropout 0.0 "
    "--hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 "
    "--attention-backend flash"
)


def config_of(line: str) -> RunConfig:
    tree = translate(shlex.split(line)).tree
    return build_config(resolve_paths(tree, RunConfig, Path("/somewhere")))


def refusals(line: str) -> str:
    with pytest.raises(ConfigError) as caught:
        translate(shlex.split(line))
    return str(caught.value)


def test_every_argument_of_slime_has_its_place_and_no_other_has() -> None:
    assert set(NAMES) - set(BY_NAME) == set()
    assert set(BY_NAME) - set(NAMES) == {"bf16"}
    assert len(BY_NAME) == sum(len(group) for group in GROUPS.values())
    assert set(BY_NAME) & set(OPTIONS) == set()


def test_settings_that_arguments_become_exist() -> None:
    for argument in BY_NAME.values():
        keys = [argument.rule.key] if isinstance(argument.rule, Setting) else []
        keys += argument.rule.keys.split() if isinstance(argument.rule, Joined) else []
        for key in keys:
            section, *rest = key.split(".")
            model: Any = RunConfig.model_fields[section].annotation
            if rest[0] == "datasets" and rest[1:]:
                model, rest = model.model_fields["datasets"].annotation.__args__[0], rest[1:]
            assert rest[0] in model.model_fields, (argument.name, key)


def test_a_synchronous_colocated_run() -> None:
    config = config_of(
        f"--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate {QWEN3} "
        "--hf-checkpoint /root/Qwen3-4B --ref-load /root/Qwen3-4B_torch_dist "
        "--load /root/out/ --save /root/out --save-interval 20 "
        "--prompt-data /root/dapo.jsonl@[0:100] --input-key prompt --label-key label "
        "--apply-chat-template --rollout-shuffle --custom-rm-path my.rm.reward --reward-key score "
        "--num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 "
        "--rollout-max-response-len 8192 --rollout-temperature 0.8 --num-steps-per-rollout 2 "
        "--balance-data --eval-interval 20 --eval-prompt-data aime /root/aime.jsonl "
        "amc /root/amc.jsonl --n-samples-per-eval-prompt 16 --eval-max-response-len 16384 "
        f"--eval-top-p 0.7 {PERFORMANCE} --advantage-estimator grpo --use-kl-loss "
        "--kl-loss-coef 0.01 --kl-loss-type low_var_kl --entropy-coef 0.00 --eps-clip 0.2 "
        "--eps-clip-high 0.28 --optimizer adam --lr 1e-6 --lr-decay-style constant "
        "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --rollout-num-gpus-per-engine 2 "
        "--sglang-mem-fraction-static 0.7 --sglang-cuda-graph-max-bs 16 --sglang-enable-metrics"
    )
    assert (config.model.path, config.storage.root) == ("/root/Qwen3-4B", "/root/out")
    assert config.data.model_dump() | {"label_key": "label"} == config.data.model_dump()
    assert (config.data.path, config.data.input_key) == ("/root/dapo.jsonl@[0:100]", "prompt")
    assert (config.data.shuffle, config.data.apply_chat_template) == (True, True)
    assert (config.run.seed, config.reward.reward_key) == (42, "score")
    assert (config.train.global_batch_size, config.train.num_steps_per_rollout) == (128, 2)
    assert (config.train.precision, config.train.adam_beta2) == ("bfloat16", 0.98)
    assert (config.train.max_tokens_per_gpu, config.train.weight_decay) == (9216, 0.1)
    assert (config.cluster.colocate, config.num_engines, config.world_size) == (True, 4, 8)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
    assert (config.algorithm.kl_loss_type, config.algorithm.kl_loss_coef) == ("low_var_kl", 0.01)
    assert config.algorithm.loss_aggregation == "sequence_mean"
    first, second = config.eval.datasets
    assert (first.name, second.path) == ("aime", "/root/amc.jsonl")
    assert (first.n_samples_per_eval_prompt, first.max_response_len) == (16, 16384)
    assert (first.temperature, first.top_p) == (0.8, 0.7)
    assert config.sglang == {
        "mem_fraction_static": 0.7,
        "cuda_graph_max_bs": 16,
        "enable_metrics": True,
    }
    assert (config.rollout.engine, config.weights.transport) == ("sglang", "tensor")


def test_a_disaggregated_run_with_dynamic_sampling_and_partial_rollouts() -> None:
    config = config_of(
        f"{SHORTEST} --actor-num-nodes 2 --actor-num-gpus-per-node 4 --rollout-num-gpus 8 "
        "--over-sampling-batch-size 16 --partial-rollout --mask-offpolicy-in-partial-rollout "
        "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters."
        "check_reward_nonzero_std --update-weight-transport disk "
        "--update-weight-disk-dir /shared --calculate-per-token-loss"
    )
    assert (config.world_size, config.num_engines, config.cluster.colocate) == (8, 8, False)
    assert (config.rollout.over_sampling_batch_size, config.rollout.partial_rollout) == (16, True)
    assert config.rollout.mask_offpolicy_in_partial_rollout
    assert config.filter.dynamic_sampling_filter_path == "nonzero_std"
    assert config.weights.transport == "disk"
    assert config.algorithm.loss_aggregation == "token_mean"


def test_algorithms_and_corrections() -> None:
    config = config_of(
        f"{SHORTEST} --advantage-estimator ppo --gamma 0.99 --lambd 0.95 --value-clip 0.3 "
        "--num-critic-only-steps 5 --kl-coef 0.01 --kl-loss-type k2 --normalize-advantages "
        "--use-tis --tis-clip 3 --tis-clip-low 0.1 --eps-clip-c 3 --entropy-coef 0.001"
    ).algorithm
    assert (config.advantage_estimator, config.num_critic_only_steps) == ("ppo", 5)
    assert (config.gamma, config.lambd, config.value_clip) == (0.99, 0.95, 0.3)
    assert (config.kl_coef, config.kl_loss_type, config.normalize_advantages) == (0.01, "k2", True)
    assert (config.use_tis, config.tis_clip, config.tis_clip_low) == (True, 3.0, 0.1)
    assert (config.eps_clip_c, config.entropy_coef) == (3.0, 0.001)
    plain = config_of(f"{SHORTEST} --disable-rewards-normalization").algorithm
    assert not plain.rewards_normalization


def test_rewards_and_hooks() -> None:
    line = SHORTEST.replace("--custom-rm-path rm.py:f", "--rm-type math")
    assert config_of(line).reward.rm_type == "math"
    remote = line.replace("math", "remote_rm --rm-url http://127.0.0.1:9/score")
    assert config_of(remote).reward.rm_url == "http://127.0.0.1:9/score"
    both = config_of(f"{SHORTEST} --rm-type math").reward
    assert (both.custom_rm_path, both.rm_type) == ("/somewhere/rm.py:f", "")
    whole = config_of(f"{SHORTEST} --rollout-function-path my.roll").rollout
    assert whole.custom_rollout_function_path == "my.roll"
    rollout = config_of(
        f"{SHORTEST} --over-sampling-batch-size 8 --partial-rollout --buffer-filter-path my.buffer "
        "--rollout-sample-hook-path my.one --rollout-sample-hook-path my.two "
        "--rollout-sample-filter-path my.some --rollout-all-samples-process-path my.all"
    ).rollout
    assert rollout.buffer_filter_path == "my.buffer"
    assert rollout.rollout_sample_filter_path == "my.some"
    assert rollout.sample_hook_paths == ["my.one", "my.two"]
    assert rollout.rollout_all_samples_process_path == "my.all"


def test_streaming_needs_no_function() -> None:
    path = "slime.rollout.sglang_streaming_rollout.generate_streaming"
    config = config_of(f"{SHORTEST} --custom-generate-function-path {path}")
    assert config.rollout.custom_generate_function_path is None
    own = config_of(f"{SHORTEST} --custom-generate-function-path my.generate")
    assert own.rollout.custom_generate_function_path == "my.generate" and own.compat.slime


def test_a_filter_alone_is_dynamic_sampling_as_in_slime() -> None:
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    config = config_of(f"{SHORTEST} --dynamic-sampling-filter-path {path}")
    assert config.rollout.over_sampling_batch_size == 4


def test_the_legacy_fsdp_trainer_keeps_its_defaults() -> None:
    config = config_of(
        f"{SHORTEST} --train-backend fsdp --gradient-checkpointing --attn-implementation "
        "flash_attention_3 --warmup-ratio 0.5"
    )
    assert (config.train.lr, config.train.adam_beta2) == (2e-5, 0.95)
    assert (config.train.lr_schedule, config.train.lr_warmup_steps) == ("constant", 4)
    assert config.train.gradient_checkpointing


def test_megatron_s_layout_becomes_settings() -> None:
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full"
    config = config_of(f"{SHORTEST} --train-backend megatron {layout}")
    assert config.train.backend == "megatron"
    assert config.megatron == {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "recompute_granularity": "full",
    }
    config = config_of(f"{SHORTEST} {layout}")
    assert (config.train.backend, config.megatron) == ("fsdp", {})


def test_what_megatron_does_with_gradients_becomes_settings() -> None:
    asked = (
        "--train-backend megatron --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --ddp-bucket-size 1000 --accumulate-allreduce-grads-in-fp32 "
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3 "
        "--decoder-first-pipeline-num-layers 5 --recompute-modules core_attn mlp"
    )
    assert config_of(f"{SHORTEST} {asked} --num-layers 12").megatron == {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "ddp_bucket_size": 1000,
        "grad_reduce_in_fp32": True,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "num_layers_in_first_pipeline_stage": 5,
        "recompute_modules": ["core_attn", "mlp"],
    }
    notes = dict(translate(shlex.split(f"{SHORTEST} {asked}")).notes)
    assert "without --num-layers" in notes["--num-layers-per-virtual-pipeline-stage"]


def test_what_evens_out_experts_is_megatron_s() -> None:
    asked = "--moe-aux-loss-coeff 0.001 --moe-router-bias-update-rate 0 --moe-grouped-gemm"
    config = config_of(f"{SHORTEST} --train-backend megatron {asked}")
    assert config.megatron == {
        "moe_grouped_gemm": True,
        "moe_aux_loss_coeff": 0.001,
        "moe_router_load_balancing_type": "aux_loss",
    }
    other = "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 1"
    with pytest.raises(ConfigError, match="sinkhorn: there are none, aux_loss, seq_aux_loss"):
        config_of(f"{SHORTEST} --train-backend megatron {other}")
    alone = f"{SHORTEST} --train-backend megatron --sequence-parallel"
    assert config_of(alone).megatron == {}
    none = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0"
    assert config_of(f"{SHORTEST} --train-backend megatron {none}").megatron == {}
    with pytest.raises(ConfigError, match=r"--moe-aux-loss-coeff 0\.001: only 0 is possible"):
        config_of(f"{SHORTEST} {asked}")


def test_what_slime_defaults_to_is_said_where_ours_is_another() -> None:
    config = config_of(SHORTEST)
    assert (config.data.input_key, config.data.shuffle) == ("input", False)
    assert (config.train.lr_schedule, config.train.weight_decay) == ("linear", 0.01)
    assert config.cluster.actor_num_gpus_per_node == 8
    assert config_of(f"{SHORTEST} --eps-clip 0.3").algorithm.clip_high == 0.3


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--rollout-functon-path x", "did you mean --rollout-function-path?"),
        ("--update-weights-interval 2", "--update-weights-interval 2: train.py syncs"),
        ("--lr much", "--lr much: could not convert"),
        ("--lr 1 2", "it takes one value, not 2"),
        ("--colocate yes", "--colocate yes: it takes no value"),
        ("--lr-decay-style wsd", "train.lr_schedule has constant, linear, cosine"),
        ("--load /elsewhere", "a checkpoint of slime is not read"),
        ("--eval-prompt-data a b c", "pairs of a name and a path"),
        ("--router-policy x", "there is no router"),
        ("--apply-chat-template-kwargs [1]", "[1] is no JSON object"),
    ],
)
def test_what_has_no_place_is_refused_with_the_nearest_thing(more: str, said: str) -> None:
    assert said in refusals(f"{SHORTEST} {more}")


@pytest.mark.parametrize(
    ("line", "moves"),
    [
        ("--colocate", (True, True)),
        ("--colocate --no-offload-train", (False, True)),
        ("--colocate --offload --no-offload-rollout", (True, False)),
        ("--rollout-num-gpus 8 --offload", (False, False)),
    ],
)
def test_who_gives_memory_back(line: str, moves: tuple[bool, bool]) -> None:
    config = config_of(f"{SHORTEST} {line}")
    assert (config.offloads_train, config.offloads_rollout) == moves


def test_all_refusals_are_told_at_once() -> None:
    told = refusals("--wandb-key k --use-opsm stray --foo").splitlines()
    assert [line.split(":")[0] for line in told[:2]] == ["--wandb-key k", "--use-opsm stray"]
    assert len(told) == 4


def test_the_printed_file_is_that_configuration(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").touch()
    line = (
        f"{SHORTEST} --eval-interval 2 --eval-prompt-data a /e.jsonl b /f.jsonl --rollout-stop "
        "'\"quoted\"' '\n' --sglang-context-length 99"
    )
    done = translate(shlex.split(line))
    text = "\n".join(lines(done))
    (tmp_path / "run.toml").write_text(text)
    expected = build_config(resolve_paths(done.tree, RunConfig, tmp_path))
    assert load_config(tmp_path / "run.toml") == expected
    assert "# --train-backend megatron: FSDP2 trains" in text


def test_functions_are_taken_as_slime_s() -> None:
    icepop = "slime.backends.megatron_utils.loss.icepop_function"
    config = config_of(f"{SHORTEST} --use-tis --custom-tis-function-path {icepop}")
    assert config.compat.slime and config.algorithm.tis_mode == "mask"
    typed = SHORTEST.replace("--custom-rm-path rm.py:f", "--rm-type math")
    assert not config_of(typed).compat.slime


def test_what_has_no_effect_in_slime_either_is_left_out_and_said() -> None:
    unused = "--kl-loss-coef 0.01 --kl-loss-type k2 --tis-clip 3 --opsm-delta 1 --opd-kl-coef 2"
    more = "--lr-decay-style constant --min-lr 1e-7 --tb-project-name boards"
    icepop = "--custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function"
    line = f"{SHORTEST} {unused} {more} {icepop}"
    config = config_of(line)
    assert (config.algorithm.kl_loss_coef, config.algorithm.tis_mode) == (0.001, "clip")
    assert (config.train.lr_min, config.tracking.tensorboard_dir) == (0.0, "")
    told = dict(translate(shlex.split(line)).notes)
    assert told["--kl-loss-coef"] == "without --use-kl-loss it has no effect"
    wanted = {"--kl-loss-type", "--tis-clip", "--opsm-delta", "--opd-kl-coef", "--min-lr"}
    assert wanted < told.keys() and "--tb-project-name" in told
    late = config_of(f"train_async.py {SHORTEST} --tis-clip 3 {icepop}").algorithm
    assert (late.use_tis, late.tis_clip, late.tis_mode) == (True, 3.0, "mask")


def test_an_evaluation_may_have_a_reward_key_of_its_own() -> None:
    assert config_of(f"{SHORTEST} --eval-reward-key acc").eval.reward_key == "acc"


def test_a_function_may_evaluate() -> None:
    config = config_of(f"{SHORTEST} --eval-function-path my.evaluate --eval-interval 5")
    assert config.eval.eval_function_path == "my.evaluate" and config.compat.slime
    same = "slime.rollout.sglang_rollout.generate_rollout"
    line = f"{SHORTEST} --eval-function-path {same} --eval-interval 5 --eval-prompt-data a /a.jsonl"
    assert config_of(line).eval.eval_function_path is None


def test_a_class_may_choose_the_prompts() -> None:
    assert config_of(f"{SHORTEST} --data-source-path my.Source").rollout.data_source_path
    built_in = "slime.rollout.data_source.RolloutDataSourceWithBuffer"
    assert config_of(f"{SHORTEST} --data-source-path {built_in}").rollout.data_source_path is None


def test_rollouts_without_training_are_a_mode() -> None:
    assert config_of(f"{SHORTEST} --debug-rollout-only").run.mode == "debug-rollout-only"
    assert config_of(SHORTEST).run.mode == "sync"


def test_wandb_is_a_tracker() -> None:
    more = "--use-wandb --wandb-project p --wandb-team t --wandb-group g --wandb-mode offline"
    tracking = config_of(f"{SHORTEST} {more} --disable-wandb-random-suffix").tracking
    assert tracking.wandb and tracking.wandb_mode == "offline"
    assert (tracking.wandb_project, tracking.wandb_entity, tracking.wandb_group) == ("p", "t", "g")
    assert "WANDB_API_KEY" in refusals(f"{SHORTEST} --use-wandb --wandb-key secret")


def test_functions_of_the_trainer_are_settings() -> None:
    more = (
        "--use-tis --custom-tis-function-path my.mis --custom-advantage-function-path my.credit "
        "--custom-pg-loss-reducer-function-path my.reduce --custom-reward-post-process-path my.post"
    )
    config = config_of(f"{SHORTEST.replace('rm.py:f', 'rm.f')} {more}")
    algorithm = config.algorithm
    assert config.compat.slime and algorithm.tis_mode == "clip"
    assert algorithm.custom_tis_function_path == "my.mis"
    assert algorithm.custom_advantage_function_path == "my.credit"
    assert algorithm.custom_pg_loss_reducer_function_path == "my.reduce"
    assert algorithm.custom_reward_post_process_path == "my.post"
    more = (
        "--custom-convert-samples-to-train-data-path my.convert --update-weight-transport disk "
        "--custom-update-weight-post-write-path my.written"
    )
    config = config_of(f"{SHORTEST.replace('rm.py:f', 'rm.f')} {more}")
    assert config.algorithm.custom_convert_samples_to_train_data_path == "my.convert"
    assert config.weights.custom_update_weight_post_write_path == "my.written"
    own = "--loss-type custom_loss --custom-loss-function-path my.loss"
    assert config_of(f"{SHORTEST} {own}").algorithm.custom_loss_function_path == "my.loss"
    assert "belong together" in refusals(f"{SHORTEST} --loss-type custom_loss")
    assert "belong together" in refusals(f"{SHORTEST} --loss-type sft_loss")
    assert "sft_loss or custom_loss" in refusals(f"{SHORTEST} --loss-type other")
    assert translate(shlex.split(f"{SHORTEST} --custom-tis-function-path my.mis")).notes


def test_training_on_stored_rollouts_is_a_mode() -> None:
    bare = SHORTEST.replace("--rollout-max-response-len 64", "").replace("--rollout-num-gpus 2", "")
    run = config_of(f"{bare} --debug-train-only --load-debug-rollout-data first").run
    assert (run.mode, run.train_from) == ("debug-train-only", "first")
    assert config_of(f"{bare} --load-debug-rollout-data first").run == run
    assert "name the stored run" in refusals(f"{SHORTEST} --debug-train-only")
    both = f"{SHORTEST} --debug-train-only --debug-rollout-only"
    assert "leave nothing to do" in refusals(both)
    file = "/dumps/rollout_{rollout_id}.pt"
    assert "files of slime are not read" in refusals(f"{SHORTEST} --load-debug-rollout-data {file}")


def test_learning_a_data_set_is_a_mode() -> None:
    sft = "slime.rollout.sft_rollout.generate_rollout"
    line = (
        "--hf-checkpoint /m --prompt-data /chats.parquet --input-key messages --tool-key tools "
        f"--num-rollout 9 --rollout-batch-size 128 --global-batch-size 128 --rollout-shuffle "
        f"--rollout-function-path {sft} --loss-type sft_loss --calculate-per-token-loss "
        "--disable-compute-advantages-and-returns --debug-train-only --loss-mask-type qwen3 "
        "--lr 1e-5 --lr-decay-style cosine --min-lr 1e-6 --lr-warmup-fraction 0.1"
    )
    config = config_of(line)
    assert (config.run.mode, config.algorithm.loss_type) == ("sft", "sft_loss")
    assert (config.data.input_key, config.rollout.n_samples_per_prompt) == ("messages", 1)
    assert (config.reward.rm_type, config.compat.slime) == ("none", False)
    assert config.algorithm.loss_aggregation == "token_mean"
    assert slime_args(config.model_dump(mode="json"))["loss_type"] == "sft_loss"
    assert "belong together" in refusals(line.replace("--loss-type sft_loss", ""))
    assert "the policy loss needs them" in refusals(
        f"{SHORTEST} --disable-compute-advantages-and-returns"
    )


def test_the_asynchronous_script_is_a_mode() -> None:
    done = translate(shlex.split(f"/root/slime/train_async.py {SHORTEST}"))
    assert any("use_tis" in why for _, why in done.notes)
    config = config_of(f"train_async.py {SHORTEST} --update-weights-interval 3")
    assert (config.run.mode, config.rollout.update_weights_interval) == ("async", 3)
    assert config.algorithm.use_tis
    plain = config_of(f"train_async.py {SHORTEST} --use-rollout-logprobs").algorithm
    assert not plain.use_tis
    assert config_of(f"train.py {SHORTEST}") == config_of(SHORTEST)
    only = config_of(f"train_async.py {SHORTEST} --load-debug-rollout-data first")
    assert only.run.mode == "debug-train-only"
    with pytest.raises(ConfigError, match="cannot share GPUs"):
        config_of(f"train_async.py {SHORTEST} --colocate")
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    endless = config_of(f"train_async.py {SHORTEST} --rollout-function-path {path}")
    assert (endless.run.mode, endless.rollout.custom_rollout_function_path) == ("fully-async", None)
    assert endless.weights.transport == "distributed"
    assert "is for train_async.py" in refusals(f"{SHORTEST} --rollout-function-path {path}")


def test_changes_alone_may_be_sent() -> None:
    line = f"{SHORTEST} --update-weight-mode delta --update-weight-local-checkpoint-dir /w "
    assert config_of(line + "--update-weight-transport disk").weights.transport == "delta"
    assert "or delta with disk" in refusals(line)


def test_engines_that_run_already_are_named_by_their_addresses() -> None:
    config = config_of(f"{SHORTEST} --rollout-external-engine-addrs 10.0.0.1:30000 10.0.0.2:30000")
    assert config.rollout.engine_urls == ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]
    assert (config.num_engines, config.cluster.rollout_num_gpus) == (2, 2)


def test_a_router_that_runs_already_is_named_by_its_address() -> None:
    config = config_of(f"{SHORTEST} --sglang-router-ip 10.0.0.3 --sglang-router-port 3000")
    assert config.rollout.sglang_router_url == "http://10.0.0.3:3000"
    with pytest.raises(ConfigError, match="only one of them is there"):
        config_of(f"{SHORTEST} --sglang-router-port 3000")
