"""Contexts made from the run: what the teacher reads before each response, which row is left out, resume, two ranks."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model
from two_ranks import run_as_two

from distill.cli import run_command
from distill.commands.arguments import plugin_override
from distill.core.ranks import exit_process
from distill.data.collator import Collator
from distill.data.source_rows import SourceRowColumn
from distill.generation.decode_loop import DecodeLoop, EngineSettings
from distill.generation.documents import documents_of
from distill.generation.function_calls import Judgement
from distill.generation.on_policy import OnPolicyRollouts
from distill.generation.reward_rows import row_table_from_recipe
from distill.generation.rewards import Rewards
from distill.generation.rollout_contexts import RolloutContexts
from distill.generation.sampling import Sampling
from distill.recipe import dump, parse
from distill.recipe.context_template import Response, names_of, render
from distill.recipe.loss import Loss
from distill.run import run
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.objective import DistillationObjective
from distill.teachers.registry import source_of
from distill.teachers.rows.context.data import LEAK, ContextColumns
from distill.teachers.rows.context.rollouts import run_contexts
from distill.teachers.rows.context.teacher import ContextTeacher
from distill.training.progress import read_metrics

TEMPLATE = """\
{% if best or feedback %}
{{ prompt }}
{% if best %}
A right answer: {{ best.answer }} ({{ best.reward }})
{% endif %}
{% if failed %}
A wrong one: {{ failed.answer }}
{% endif %}
{% if feedback %}
On yours: {{ feedback }}
{% endif %}
It is {{ row.sum }}.
{% endif %}
"""
FILE = """
def right(prompt, answer, row):
    count = sum(ord(letter) for letter in answer) % 7
    return (count / 3, f"it counts {count}") if count < 3 else (count / 3, None)
"""
RUN = """
teacher: {type: student, ema: 0.5, context: {syntax: jinja, place: user, missing: plain, room: 200}}
student: {model: student}
data:
    source: chats.jsonl
    max_length: 384
    cache: false
    validation: {fraction: 0.2}
    on_policy: {max_new_tokens: 6, samples: 4, reward: "mine.py:right"}
loss: {terms: [{type: reverse_kl}]}
train: {steps: 4, batch_size: 4, learning_rate: 1e-3, warmup: 0, log_every: 1, device: cpu, save_every: 2}
generate: {prompts: []}
"""


def chat(number, **more):
    question = f"What is {number} plus {number}?"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": f"It is {2 * number}."}]
    return {"messages": turns, "sum": str(2 * number)} | more


pytestmark = pytest.mark.place(
    files={"chats.jsonl": [chat(n) for n in range(20)], "mine.py": FILE}, student={"seed": 2}
)


def recipe_of(*overrides, template=TEMPLATE):
    written = f"teacher.context.template={json.dumps(template)}"
    return parse(RUN, [*plugin_override(Path("mine.py")), written, *overrides])


def count(answer):
    return sum(map(ord, answer)) % 7


def judge(inputs):
    made = [(count(each.answer), each.answer) for each in inputs]
    return [Judgement(n / 3, f"it counts {n}" if n < 3 else None) for n, _ in made]


def rolled_out(recipe, judge=judge, prompts=4, **more):
    """Batch of the student's responses, with what they were made by."""
    vocabulary = source_of(recipe).vocabulary()
    tokenizer = vocabulary.tokenizer
    rows = list(vocabulary.read(recipe.data, 0).train)[:prompts]
    student = tiny_model(tokenizer, seed=2, dtype=torch.float64)
    table = row_table_from_recipe(recipe, tokenizer, [0]).function_input
    contexts = run_contexts(recipe, tokenizer)
    rollouts = OnPolicyRollouts(
        DecodeLoop(student, EngineSettings(2, [0], log_probs=True)),
        fraction=1.0,
        max_new_tokens=recipe.data.on_policy.max_new_tokens,
        sampling=Sampling(recipe.data.on_policy.temperature),
        seed=3,
        max_length=recipe.data.max_length,
        samples=recipe.data.samples,
        rewards=Rewards(judge, table),
        contexts=RolloutContexts(contexts, table, recipe.data.max_length) if contexts else None,
        **more,
    )
    collate = Collator(0, columns=[ContextColumns(), SourceRowColumn()])
    (batch,) = rollouts.replace([collate(rows)], 0, collate)
    return batch, rollouts, student, tokenizer


def groups_of(batch, tokenizer):
    """The responses of each prompt in order: document, question, and text without the token that ended it."""
    groups = {}
    for document in documents_of(batch):
        answer = document.ids[len(document.prompt) :]
        text = tokenizer.decode(answer[:-1] if answer[-1] == 0 else answer, clean_up_tokenization_spaces=False)
        question = tokenizer.decode(document.prompt).split("user\n")[1].split("<|end|>")[0]
        groups.setdefault(question, []).append((document, text))
    return groups


def by_hand(question, answers, index):
    """The teacher's message for a response, written without the template."""
    own = answers[index]
    others = [text for text in answers if text.strip() != own.strip()]
    good = [text for text in others if count(text) >= 3]
    bad = [text for text in others if count(text) < 3]
    if not good and count(own) >= 3:
        return question
    lines = [question]
    if good:
        best = max(good, key=count)
        lines.append(f"A right answer: {best} ({count(best) / 3})")
    if bad:
        lines.append(f"A wrong one: {min(bad, key=count)}")
    if count(own) < 3:
        lines.append(f"On yours: it counts {count(own)}")
    number = int(question.split()[2])
    return "\n".join([*lines, f"It is {2 * number}."])


def test_loss_is_that_of_teacher_inputs_made_by_hand(workplace):
    """Reverse KL over full logits in float64, each response after the message that its group gives the teacher."""
    batch, rollouts, student, tokenizer = rolled_out(recipe_of())
    model = tiny_model(tokenizer, seed=1, hidden=64, dtype=torch.float64)
    objective = DistillationObjective(
        ContextTeacher(LoadedTeacher(model)), student, Loss.model_validate({"terms": [{"type": "reverse_kl"}]})
    )
    got = student(**objective.student_inputs(batch))["loss"]
    objective.detach()
    total, tokens, seen = 0.0, 0, set()
    for question, members in groups_of(batch, tokenizer).items():
        assert len(members) == 4
        for index, (document, _) in enumerate(members):
            message = by_hand(question, [text for _, text in members], index)
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
            )
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
            answer = document.ids[len(document.prompt) :]
            assert document.teacher_ids == [*prompt, *answer]
            seen.add(("right answer" in message, "On yours" in message))

            def log_p(model, before, answer=answer):
                logits = model(torch.tensor([[*before, *answer]]), use_cache=False).logits[0].double()
                return logits[len(before) - 1 : -1].log_softmax(-1)

            log_s, log_t = log_p(student, document.prompt), log_p(model, prompt)
            total = total + (log_s.exp() * (log_s - log_t)).sum()
            tokens += len(answer)
    assert len(seen) > 2, "each kind of context occurs"
    torch.testing.assert_close(got, total / tokens, rtol=1e-9, atol=1e-12)
    figures = rollouts.pop_metrics(lambda values: values, torch.device("cpu"))
    with_context = [
        len(document.teacher_ids) - len(document.ids) + len(document.prompt)
        for document in documents_of(batch)
        if len(document.teacher_ids) != len(document.ids)
    ]
    assert figures["rollout_context"] == pytest.approx(len(with_context) / 16)
    assert figures["rollout_context_length"] == pytest.approx(sum(with_context) / len(with_context))


def test_no_response_is_shown_to_the_teacher_that_scores_it(workplace):
    """Neither as the best of its group nor as another one of the same text."""
    same = "{% for each in rollouts %}<{{ each.answer }}>{% endfor %}"
    recipe = recipe_of("data.on_policy={max_new_tokens: 3, temperature: 0.3, samples: 4}", template=same)
    batch, _, _, tokenizer = rolled_out(recipe, prompts=8)
    repeated = 0
    for members in groups_of(batch, tokenizer).values():
        texts = [text for _, text in members]
        repeated += len(set(texts)) < len(texts)
        for document, own in members:
            context = tokenizer.decode(document.teacher_ids[: -(len(document.ids) - len(document.prompt))])
            assert f"<{own}>" not in context
            assert all(f"<{text}>" in context for text in texts if text.strip() != own.strip())
    assert repeated, "some groups hold a text twice"


def test_responses_without_a_context_are_left_out_or_scored_plainly(workplace):
    def by(missing, judge=judge, template="{{ best.answer }}"):
        batch, rollouts, *_ = rolled_out(recipe_of(f"teacher.context.missing={missing}", template=template), judge)
        return documents_of(batch), rollouts.pop_metrics(lambda values: values, torch.device("cpu"))

    plain, figures = by("plain")
    skipped, others = by("skip")
    assert 0 < figures["rollout_context"] == others["rollout_context"] < 1
    share = [document.teacher_ids != document.ids for document in plain]
    assert len(plain) == 16 and sum(share) == len(skipped) == 16 * figures["rollout_context"]
    kept = [document.teacher_ids for document, own in zip(plain, share, strict=True) if own]
    assert [document.teacher_ids for document in skipped] == kept
    none, figures = by("skip", lambda inputs: [0.0] * len(inputs))
    assert not none and figures["rollout_context"] == 0 and figures["rollouts"] == 16


def test_a_context_that_finds_no_room_is_missing(workplace):
    """Neither reading is longer than the rows have room for."""
    recipe = recipe_of("teacher.context.room=40", template="{{ 'so ' * (rollouts[0].reward * 9) | int }}")
    batch, rollouts, *_ = rolled_out(recipe)
    figures = rollouts.pop_metrics(lambda values: values, torch.device("cpu"))
    assert 0 < figures["rollout_context"] < 1
    assert all(len(document.teacher_ids) <= document.prompt_length + 6 + 40 for document in documents_of(batch))


def test_a_step_of_nothing_but_missing_contexts_trains_nothing(workplace, caplog):
    """Its loss is 0, not NaN, and the run goes on."""
    (workplace / "mine.py").write_text("def right(prompt, answer, row):\n    return 0\n")
    recipe = recipe_of("teacher.context.missing=skip", "train.steps=2", template="{{ best.answer }}")
    folder = run(recipe, name="none", plugin=Path("mine.py")).folder
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "rollout_context" in row]
    assert [row["loss"] for row in rows] == [0.0, 0.0] and all(row["rollout_context"] == 0 for row in rows)
    assert "step 2: no response has a teacher.context (rollout_context 0)" in caplog.text


@pytest.mark.full
@pytest.mark.parametrize("more", [[], ["data.on_policy.max_staleness=1"]])
def test_a_resumed_run_is_the_same_to_the_bit(workplace, more):
    whole = run(recipe_of(*more), name="whole", plugin=Path("mine.py")).folder
    again = whole.parent / "again"
    shutil.copytree(whole, again)
    for path in (again / "checkpoint-4", again / "student"):
        shutil.rmtree(path)
    (again / "result.json").unlink()
    run(recipe_of(*more), name="again", resume=True, plugin=Path("mine.py"))
    logged = []
    for folder in (whole, again):
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if "rollout_context" in row]
        logged.append(
            [(row["step"], row["loss"], row["rollout_context"], row["rollout_context_length"]) for row in rows]
        )
    assert logged[0] == logged[1] and len(logged[0]) == 4 and any(row[2] > 0 for row in logged[0])
    both = [load_file(folder / "student" / "model.safetensors") for folder in (whole, again)]
    assert all(torch.equal(value, both[1][name]) for name, value in both[0].items())


def two_steps(name, *overrides):
    """Loss, rewards and contexts of two steps of two prompts with four responses each."""
    recipe = recipe_of("train.steps=2", "train.tokens_per_step=3072", "student.dtype=float32", *overrides)
    folder = run(recipe, name=name, plugin=Path("mine.py")).folder
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "rollout_context" in row]
    keys = ("loss", "reward", "rollout_context", "rollout_context_length", "trained_tokens")
    return [[row[key] for key in keys] for row in rows]


@pytest.mark.full
def test_results_do_not_depend_on_the_number_of_processes(workplace):
    expected = two_steps("one")
    assert len(expected) == 2 and any(row[2] > 0 for row in expected)
    run_as_two(__file__, cwd=workplace, timeout=300)
    found = json.loads((workplace / "two.json").read_text())
    for mine, other in zip(expected, found, strict=True):
        assert other == pytest.approx(mine, rel=1e-5)


@pytest.mark.full
def test_each_route_has_its_own_context(workplace):
    """Teachers of a route read its template; one without a context reads the student's prompt."""
    rows = [chat(n, teacher=("best", "failed", "plain")[n % 3]) for n in range(18)]
    (workplace / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    contexts = ["'B {{ best.answer }}'", "'F {{ failed.answer }}'"]
    given = [
        f"{{model: student, route: {name}, context: {{syntax: jinja, missing: plain, template: {text}}}}}"
        for name, text in zip(("best", "failed"), contexts, strict=True)
    ]
    recipe = parse(
        RUN.split("\n", 2)[2],
        [
            *plugin_override(Path("mine.py")),
            f"teachers=[{', '.join([given[0], *given])}, {{model: student, route: plain}}]",  # the first is a mixture
            "data.fields={teacher: teacher}",
            "data.unread=[sum]",
        ],
    )
    vocabulary = source_of(recipe).vocabulary()
    assert sorted(run_contexts(recipe, vocabulary.tokenizer)) == [0, 1]
    folder = run(recipe, name="routes", plugin=Path("mine.py")).folder
    shares = [row["rollout_context"] for row in read_metrics(folder / "metrics.jsonl") if "rollout_context" in row]
    assert len(shares) == 4 and any(shares)


@pytest.mark.full
def test_doctor_checks_such_a_recipe(workplace, forked_ranks, capsys):
    """With contexts that stand for those of rewarded responses, since it runs no code of the recipe."""
    recipe = recipe_of()
    (workplace / "r.yaml").write_text(dump(recipe))
    assert run_command(["doctor", "r.yaml"]) == 0
    assert "all passed" in capsys.readouterr().out


# ------------------------------------------------------------------ rows alone


@pytest.mark.parametrize("format", ["chats", "pairs"])
@pytest.mark.parametrize(
    "place, syntax, template",
    [("user", "columns", "Say {sum}."), ("prompt", "jinja", "{{ prompt[:7] }} {{ row.sum }}")],
)
def test_a_prompt_may_be_replaced(workplace, format, place, syntax, template):
    """The teacher reads the text in place of the question, or of everything before the response."""
    rows = [chat(n) for n in range(6)]
    for row in rows:
        row["messages"].insert(0, {"role": "system", "content": "Be brief."})
    if format == "pairs":
        rows = [{"prompt": f"What is {n}?", "completion": "Nine.", "sum": str(n)} for n in range(6)]
    (workplace / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = recipe_of(
        "data.on_policy=null",
        "data.packing=false",
        f"teacher.context.place={place}",
        f"teacher.context.syntax={syntax}",
        *["data.chat_template=none"] * (format == "pairs"),
        template=template,
    )
    vocabulary = source_of(recipe).vocabulary()
    for row in vocabulary.read(recipe.data, 0).train:
        own, other = (vocabulary.tokenizer.decode(row[f"{who}input_ids"]) for who in ("", "teacher_"))
        number = own.split("What is ")[1].split("?")[0].split()[0]
        total = 2 * int(number) if format == "chats" else int(number)
        text = f"Say {total}." if syntax == "columns" else f"What is {total}"
        if format == "pairs":
            assert other == f"{text}\nNine.<|end|>"
        else:
            system = "<|start|>system\nBe brief.<|end|>\n" * (place == "user")
            assert own.startswith("<|start|>system\nBe brief.") and other.split("<|start|>assistant")[0] == (
                f"{system}<|start|>user\n{text}<|end|>\n"
            )


@pytest.mark.parametrize("syntax, template", [("columns", "Say {hint}."), ("jinja", "Say {{ row.hint }}.")])
def test_rows_that_lack_a_column_are_dropped_or_read_plainly(workplace, syntax, template):
    rows = [chat(n, hint=f"the number {2 * n} and no other") for n in range(6)] + [chat(7), chat(8, hint=None)]
    del rows[7]["hint"]
    (workplace / "chats.jsonl").write_text("\n".join(json.dumps({"hint": None} | row) for row in rows))
    for missing, dropped in (("skip", {"nothing for the teacher's context": 2}), ("plain", {})):
        recipe = recipe_of(
            "data.on_policy=null",
            f"teacher.context.syntax={syntax}",
            f"teacher.context.missing={missing}",
            template=template,
        )
        splits = source_of(recipe).vocabulary().read(recipe.data, 0)
        assert splits.report.dropped == dropped


def test_columns_of_a_jinja_template_never_reach_the_students_prompt(workplace):
    rows = [chat(n, hint=f"the number {2 * n} and no other") for n in range(6)]
    rows[2]["messages"][0]["content"] += rows[2]["hint"]
    (workplace / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = recipe_of("data.on_policy=null", template="{{ prompt }} {{ row.hint }}")
    assert source_of(recipe).vocabulary().read(recipe.data, 0).report.dropped == {LEAK: 1}


# ------------------------------------------------------------------ recipes


def test_names_of_a_template():
    found = names_of("{% for one in rollouts %}{{ one.answer }}{% endfor %}{{ row.a }}{{ row['b c'] }}{{ feedback }}")
    assert found == (("a", "b c"), ("rollouts", "feedback"))
    assert render("{% if best %}a{% else %}b{% endif %}", {}) == "b" and render("a {{ best.answer }}", {}) == ""


@pytest.mark.parametrize(
    "template",
    [
        "Right: {{ best }}",
        "{{ rollouts[0] if rollouts else '' }}",
        "{{ best or failed }}",
        "{{ rollouts | join(', ') }}",
        "{{ rollouts }}",
        "{% for one in rollouts[:2] %}{{ one }}{% endfor %}",
        "{% set one = best %}{{ row.number | int + 1 }}{{ 'Right: %s' | format(one) }}",
        "{{ 'Right: ' ~ best }}",
    ],
)
def test_a_template_writes_fields_of_responses_and_never_a_whole_one(template):
    """Else the teacher would read the Python text of a dict."""
    with pytest.raises(ValueError, match=r"expected a field of a response, such as best\.answer"):
        names_of(template)


def test_a_whole_response_of_a_run_alone_ends_it():
    """Where values of no row take another branch of the template."""
    template = "{% if row.kind == 'hard' %}{{ failed }}{% endif %}"
    assert names_of(template).columns == ("kind",)
    of_a_run = {"row": {"kind": "hard"}, "failed": Response(answer="4")}
    with pytest.raises(ValueError, match=r"teacher\.context\.template: expected a field of a response"):
        render(template, of_a_run)


def test_fields_of_responses_are_written_in_any_way():
    for template in (
        "{% if best %}{{ best.answer.split('x')[-1] }}{% endif %}{{ best and best.answer }}",
        "{{ (best or failed).answer }}",
        "{{ rollouts | map(attribute='answer') | join }}{{ rollouts[0].answer }}{{ rollouts | length }}",
        "{% for one in rollouts | map(attribute='answer') %}{{ one }}{% endfor %}{{ feedback }} {{ reward }}",
        "{% for word in rollouts[0].answer.split() %}{{ word }}{% endfor %}",
    ):
        assert names_of(template).of_the_run


if __name__ == "__main__":  # one of two processes
    torch.set_num_threads(1)
    result = two_steps("two", "train.batch_size=4")
    if torch.distributed.get_rank() == 0:
        Path("two.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    sys.stdout.flush()
    exit_process(0)
