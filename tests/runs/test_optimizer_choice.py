"""The recipe's optimizer: FusedAdamW on a GPU, the same algorithm of torch on a CPU, others by their own names.

And what other packages bring: an optimizer or a report that is not installed is told before the run begins.
"""

import re
from pathlib import Path

import pytest
import torch
from distill_kernels.optim.adamw import FusedAdamW
from test_run import PLACE
from test_run import recipe as small
from tiny import tiny_model
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from distill.cli import run_command
from distill.models.dtypes import resolve_precision
from distill.models.sharding import SINGLE_PROCESS, Placement
from distill.planning import steps
from distill.planning.run_plan import plan_steps
from distill.recipe import dump, parse
from distill.recipe.library_names import optimizer_problem
from distill.run import run
from distill.training.arguments import fused_optimizer, training_arguments
from distill.training.step_guard import norm_of
from distill.training.trainer import DistillationTrainer

pytestmark = PLACE

SHARDED = Placement("fsdp", False, True)
RECIPE = "teacher: {model: a}\nstudent: {model: b}\ndata: {source: c}\ntrain: {steps: 2}\n"


def arguments(recipe, device, folder, sharing=SINGLE_PROCESS):
    device, plan = torch.device(device), plan_steps(recipe, 8, sharing)
    return training_arguments(recipe, folder, plan, device=device, precision=resolve_precision(recipe, device))


def test_on_a_cpu_torch_serves(tmp_path: Path):
    recipe = parse(RECIPE)
    made = arguments(recipe, "cpu", tmp_path)
    assert fused_optimizer(recipe, made) is None
    assert made.optim == "adamw_torch"


def test_another_optimizer_by_its_name(tmp_path: Path):
    recipe = parse(RECIPE, ["train.optimizer=adafactor"])
    made = arguments(recipe, "cpu", tmp_path)
    assert fused_optimizer(recipe, made) is None and made.optim == "adafactor"


@pytest.mark.parametrize("name", ["adagrad", "adafactor"])
def test_what_cannot_train_shards_is_refused_before_it_starts(name, tmp_path: Path, monkeypatch):
    recipe = parse(RECIPE, [f"train.optimizer={name}"])
    assert arguments(recipe, "cpu", tmp_path, SHARDED).optim == name  # one process cuts nothing
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=rf"^train\.optimizer: {name} cannot train a student sharded .*ddp$"):
        arguments(recipe, "cpu", tmp_path, SHARDED)


@pytest.mark.gpu
def test_on_a_gpu_ours_with_its_settings(tmp_path: Path):
    recipe = parse(RECIPE, ["train.optimizer_states=float32", "train.arguments.adam_beta2=0.95"])
    chosen = fused_optimizer(recipe, arguments(recipe, "cuda", tmp_path))
    assert chosen is not None and chosen[0] is FusedAdamW
    assert chosen[1]["betas"] == (0.9, 0.95) and chosen[1]["state_dtype"] == torch.float32
    assert chosen[1]["stochastic_rounding"] and not chosen[1]["master_weights"]


@pytest.mark.plain("galore_adamw-galore_torch")
@pytest.mark.parametrize(
    ("name", "package"),
    [("galore_adamw", "galore_torch"), ("schedule_free_sgd", "schedulefree")],
)
def test_an_unavailable_optimizer_is_refused_before_models_are_loaded(name, package, workplace, capsys, fault):
    fault.setattr("distill.run.opened_pair", lambda *args: pytest.fail("the models are loaded"))
    said = f"train.optimizer: {name}: expected its package {package}, which is not installed here"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        run(small(f"train.optimizer={name}"))
    assert not (workplace / "runs").exists()
    Path("r.yaml").write_text(dump(small()))
    assert run_command(["validate", "r.yaml", f"train.optimizer={name}"]) == 0
    assert said in capsys.readouterr().err
    assert run_command(["check", "r.yaml", f"train.optimizer={name}"]) == 1
    assert said in capsys.readouterr().out.replace("\n            ", " ")
    assert run_command(["validate", "r.yaml"]) == 0
    assert "expected its package" not in capsys.readouterr().err


@pytest.mark.parametrize("name", list(OptimizerNames))
def test_the_package_of_every_optimizer_is_known(name, tmp_path: Path):
    """What transformers itself refuses for want of a package is what is refused beforehand."""
    made = TrainingArguments(str(tmp_path), optim=name.value, use_cpu=True, report_to="none")
    try:
        Trainer.get_optimizer_cls_and_kwargs(made, None)
        refused = False
    except (ImportError, ValueError) as error:
        refused = bool(re.search("install|failed to import", str(error)))
    assert (optimizer_problem(name.value) is not None) == refused


def test_unavailable_report_targets_are_refused_before_the_run(workplace, library):
    library.setattr(steps, "get_available_reporting_integrations", lambda: ["tensorboard"])
    assert steps.report_to_problem(["tensorboard", "all"]) is None
    for name, expected in (("wandb", "wandb is not installed here"), ("wandbb", "expected some of .*; got wandbb")):
        with pytest.raises(ValueError, match=rf"^train\.report_to: {expected}"):
            run(small(f"train.report_to={name}"))
    assert not (workplace / "runs").exists()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("{label_smoothing_factor: 0.1}", "label_smoothing_factor is set by loss.label_smoothing"),
        ("{use_liger_kernel: true}", "use_liger_kernel: expected false"),
        ("{accelerator_config: {split_batches: true}}", "accelerator_config.split_batches: expected false"),
        ("{enable_jit_checkpoint: true}", "enable_jit_checkpoint: expected false, since it takes SIGTERM"),
        ("{ignore_data_skip: true}", "ignore_data_skip: expected false, since a resumed run"),
        ("{eval_strategy: epoch}", "eval_strategy is set by train.eval_every"),
        ("{adam_beta2: much}", "adam_beta2: expected a number, got 'much'"),
        ("{dataloader_drop_last: 3}", "dataloader_drop_last: expected true or false, got 3"),
        ("{lr_scheduler_kwargs: {cycles: 2}}", "lr_scheduler_kwargs: .*unexpected keyword argument 'cycles'"),
    ],
)
def test_arguments_that_would_do_nothing_or_fail_later_are_refused(given, expected, tmp_path: Path):
    with pytest.raises(ValueError, match=rf"arguments\.{expected}"):
        arguments(parse(RECIPE, [f"train.arguments={given}"]), "cpu", tmp_path)


def test_arguments_of_the_right_kind_pass(tmp_path: Path):
    given = "{adam_beta2: 0.95, eval_delay: 0.5, dataloader_drop_last: true, lr_scheduler_kwargs: {num_cycles: 1}}"
    made = arguments(parse(RECIPE, [f"train.arguments={given}"]), "cpu", tmp_path)
    assert made.adam_beta2 == 0.95 and made.dataloader_drop_last and made.lr_scheduler_kwargs == {"num_cycles": 1}


def test_clipping_within_the_optimizers_step_is_clipping(tmp_path, hardware):
    """Gradients stay as they are; the optimizer divides them by what would have clipped them."""
    ends = []
    for within in (True, False):
        norms = []
        hardware.setattr("distill.training.step_guard.joins_on", lambda device, within=within: within)
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            max_grad_norm=1e-2,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            save_strategy="no",
            seed=3,
        )
        rows = [{"input_ids": list(range(start, start + 9))} for start in range(3, 15)]
        trainer = DistillationTrainer(
            tiny_model(),
            tiny_model(seed=1),
            arguments,
            train_dataset=rows,
            optimizer_cls_and_kwargs=(FusedAdamW, {"lr": 1e-2, "eps": 1e-2}),
        )
        clip = trainer._clip_grad_norm

        def see(model, clip=clip, norms=norms):
            clip(model)
            norms.append(float(norm_of(model.parameters())))

        trainer._clip_grad_norm = see
        trainer.train()
        ends.append([p.detach() for p in trainer.model.parameters()])
        assert all((norm > 2e-2) == within for norm in norms)
    for ours, torchs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)
