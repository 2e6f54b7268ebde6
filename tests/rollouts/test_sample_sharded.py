"""Teachers in shards over two processes answer prompts and are judged against as whole ones are in one process.

The file is also the program of the two processes, which run all commands in one start.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from test_cache_sharded import ON, said_by
from test_parallel import gpu_of
from tiny import save_models, save_tiny, tiny_model
from two_ranks import run_as_two

from distill.cli import run_command
from distill.core import ranks
from distill.evaluation.targets import find_target, needs_sharding

RECIPE = """
teacher: {model: teacher}
student: {model: student}
data: {source: text.txt, max_length: 32, cache: false, validation: {fraction: 0.2}}
train: {steps: 1, batch_size: 1}
parallel: {teacher: sharded}
"""
QUESTIONS = [f"What is {n} plus {'one and ' * (n % 3)}{n}?" for n in range(9)]
TOLD = ["--max-new-tokens", "9", "--batch-size", "2"]
CASES = {
    "greedy": ["--temperature", "0", "teacher.model=teacher"],
    "drawn": ["--temperature", "1", "--seed", "3", "teacher.model=untied"],
}


JUDGED = {"eval": ["--before", "student"], "eval-batched": ["--batch-size", "3", "--teacher", "untied"]}


def sample(case, device, out, *more):
    files = ["--prompts", "questions.txt", "--out", out, "--from", "teacher", "--engine", "transformers"]
    return ["sample", "tiny.yaml", *ON[device], *files, *TOLD, *CASES[case], *more]


def both(folder, device):
    """Body of each of the two processes."""
    os.chdir(folder)
    torch.set_num_threads(1)
    found = {case: said_by(sample(case, device, f"two-{case}.jsonl", "--json")) for case in CASES}
    found["again"] = said_by(sample("greedy", device, "two-greedy.jsonl"))
    found["resumed"] = said_by(sample("greedy", device, "begun.jsonl"))
    found["vllm"] = said_by([*sample("greedy", device, "never.jsonl"), "--engine", "vllm"])
    found["student"] = said_by([*sample("greedy", device, "never.jsonl"), "--from", "student"])
    found["copied"] = said_by(sample("greedy", device, "never.jsonl", "parallel.teacher=copied"))
    found |= {name: said_by(["eval", "mine", "--json", *more]) for name, more in JUDGED.items()}
    found["whole"] = said_by(["eval", "student", "--teacher", "teacher", "--data", "text.txt"])
    Path(f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))


def made_by_two(folder, device):
    """The folder in which one process and two have run all commands."""
    tokenizer = save_models(folder, teacher={"layers": 3, "hidden": 48, "seed": 1})
    ends = tiny_model(tokenizer, layers=3, seed=3, tie=False)
    ends.generation_config.eos_token_id = list(range(3, 259, 8))  # answers of all lengths
    save_tiny(folder / "untied", ends, tokenizer)
    save_tiny(folder / "student", tiny_model(tokenizer, seed=2), tokenizer)
    (folder / "questions.txt").write_text("\n".join(QUESTIONS))
    (folder / "text.txt").write_text("\n".join(f"The teacher explains line {i} once more." for i in range(20)))
    (folder / "tiny.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        alone = {case: said_by(sample(case, device, f"one-{case}.jsonl", "--json")) for case in CASES}
        assert run_command(["run", "tiny.yaml", *ON[device], "--name", "mine", "generate.prompts=[]"]) == 0
        alone |= {name: said_by(["eval", "mine", "--json", *more]) for name, more in JUDGED.items()}
        whole = (folder / "one-greedy.jsonl").read_text().splitlines(keepends=True)
        (folder / "begun.jsonl").write_text("".join(whole[:3]) + whole[3][:20])
        run_as_two(__file__, folder, device, device=device)
    return folder, alone, [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return made_by_two(tmp_path_factory.mktemp("answers"), "cpu")


@pytest.fixture(scope="module")
def made_on_gpus(tmp_path_factory):
    return made_by_two(tmp_path_factory.mktemp("answers"), "cuda")


PLACES = ["made", pytest.param("made_on_gpus", marks=pytest.mark.gpu)]


@pytest.mark.full  # two processes
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_shards_answer_as_the_whole_teacher_does(request, place, case):
    folder, alone, (first, second) = request.getfixturevalue(place)
    assert alone[case]["code"] == first[case]["code"] == second[case]["code"] == 0, (alone[case], first, second)
    one, two = ((folder / f"{ways}-{case}.jsonl").read_text().splitlines() for ways in ("one", "two"))
    assert len(two) == len(QUESTIONS) and len({json.loads(line)["completion"] for line in two}) > 2
    assert two == one
    assert not second[case]["out"], "one process speaks"
    told = json.loads(first[case]["out"][first[case]["out"].index("{") :])
    assert told["made"] == len(QUESTIONS) and (case == "greedy" or 0 < told["truncated"] < told["made"])


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
def test_shards_go_on_where_they_broke_off(request, place):
    folder, _, (first, second) = request.getfixturevalue(place)
    assert first["resumed"]["code"] == second["resumed"]["code"] == 0, (first, second)
    assert "3 responses already existed" in first["resumed"]["out"]
    assert (folder / "begun.jsonl").read_text() == (folder / "one-greedy.jsonl").read_text()
    assert "9 responses already existed" in first["again"]["out"]


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", JUDGED)
def test_evaluation_by_a_sharded_teacher_equals_that_by_a_whole_one(request, place, case):
    _, alone, (first, second) = request.getfixturevalue(place)
    assert alone[case]["code"] == first[case]["code"] == second[case]["code"] == 0, (alone[case], first, second)
    assert not second[case]["out"], "one process speaks"
    one, two = (json.loads(way[case]["out"]) for way in (alone, first))
    assert one["tokens"] == two["tokens"] > 50 and one.keys() == two.keys()
    for name, figure in one["figures"].items():  # what of a GPU differs by the kernels chosen
        assert two["figures"][name] == pytest.approx(figure, rel=1e-6 if place == "made" else 1e-2), name
    assert one["figures"]["forward_kl"]["value"] > 0


@pytest.mark.full
@pytest.mark.parametrize(
    "name, expected",
    [
        ("vllm", "--engine: vllm loads the teacher whole, and parallel.teacher holds it in shards"),
        ("student", "parallel.teacher: 2 processes generate together only with a sharded teacher"),
        ("copied", "parallel.teacher: 2 processes generate together only with a sharded teacher"),
        ("whole", "parallel.teacher: expected sharded in the run's recipe for an evaluation on 2 processes"),
    ],
)
def test_what_several_processes_cannot_do_is_one_line(made, name, expected):
    folder, _, found = made
    for each in found:
        assert each[name]["code"] == 2
        assert expected in each[name]["errors"] and each[name]["errors"].count("\n") == 1
    assert not (folder / "never.jsonl").exists()


@pytest.mark.full
@pytest.mark.parametrize("how, started", [("sharded", True), ("copied", False)])
def test_several_gpus_are_taken_where_shards_are(made, monkeypatch, torchrun, how, started):
    folder, _, _ = made
    monkeypatch.chdir(folder)
    gpu_of(monkeypatch, 80)
    starts = torchrun(gpus=4)
    command = ["sample", "tiny.yaml", f"parallel.teacher={how}", *sample("drawn", "cuda", f"{how}.jsonl")[2:]]
    command = [part for part in command if not part.startswith("train.")]
    assert run_command(command) == 0
    assert len(starts) == started
    if started:
        processes, again = starts[0]
        assert processes == 4
        assert again == command


@pytest.mark.full
def test_judging_takes_several_gpus_where_shards_are_and_tasks_none(made, monkeypatch, torchrun, capsys):
    folder, _, _ = made
    monkeypatch.chdir(folder)
    gpu_of(monkeypatch, 80)
    starts = torchrun(gpus=4)
    for more in (["--before", "student"], ["--data", "text.txt", "--max-length", "16"]):
        starts.clear()
        assert run_command(["eval", "mine", *more]) == 0
        assert starts == [(4, ["eval", "mine", *more])]
    assert run_command(["eval", "mine", "--tasks", "hellaswag"]) == 2
    assert "parallel.teacher: expected an unsharded teacher for tasks" in capsys.readouterr().err
    target = find_target("mine")
    assert needs_sharding(target, None, 4, 1) and needs_sharding(target, "untied", 4, 1)
    assert not needs_sharding(target, None, 1, 1) and not needs_sharding(find_target("student"), "teacher", 4, 1)


if __name__ == "__main__":
    both(*sys.argv[1:])
    torch.distributed.destroy_process_group()
    ranks.exit_process(0)
