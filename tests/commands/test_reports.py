"""Reports of a run for a reader: samples, curves and the model card."""

import re
import sys
from xml.etree import ElementTree

import pytest
import torch
import yaml
from tiny import tiny_model, tiny_tokenizer

from distill.evaluation.evaluate import HeldOut
from distill.evaluation.generate import stream
from distill.generation.engines import greedy_responses
from distill.generation.prompts import encode_prompt
from distill.reports.curves import draw_curves
from distill.reports.model_card import code_block, escape, write_model_card
from distill.reports.run_summary import samples_text, write_samples
from distill.reports.style import DARK, LIGHT

BEFORE = HeldOut(2048, 4.0, 3.0, 0.25, 5.0, 2.0, 1.0, 1.5)
SVG = "{http://www.w3.org/2000/svg}"
AFTER = HeldOut(2048, 1.0, 1.2, 0.625, 3.0, 2.0, 1.0, 1.5)

# ---------------------------------------------------------------- samples


def test_prompts_are_user_turns_where_there_is_a_template():
    chat, plain = tiny_tokenizer(), tiny_tokenizer(chat_template=None)
    assert chat.decode(encode_prompt(chat, "hi")) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert plain.decode(encode_prompt(plain, "hi")) == "hi"


def test_answers_are_greedy_and_end_at_the_end_token():
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer).train()
    prompts = ["What?", "Why is the sky blue?"]
    answers = greedy_responses(model, tokenizer, prompts, max_new_tokens=6)
    torch.manual_seed(5)
    assert answers == greedy_responses(model, tokenizer, prompts, max_new_tokens=6), "random numbers were drawn"
    assert model.training, "the mode must be given back"
    with torch.no_grad():
        ids, expected = torch.tensor([encode_prompt(tokenizer, prompts[0])]), []
        for _ in range(6):
            best = model.eval()(input_ids=ids).logits[0, -1].argmax()
            if best.item() == tokenizer.eos_token_id:
                break
            expected.append(best.item())
            ids = torch.cat([ids, best[None, None]], dim=1)
    assert answers[0] == tokenizer.decode(expected, skip_special_tokens=True).strip()
    model.lm_head = torch.nn.Linear(32, len(tokenizer))
    torch.nn.init.zeros_(model.lm_head.weight)
    torch.nn.init.zeros_(model.lm_head.bias)
    model.lm_head.bias.data[tokenizer.eos_token_id] = 9.0  # always says that it is done
    assert greedy_responses(model, tokenizer, ["Well?"], max_new_tokens=6) == [""]


def test_a_models_own_habits_of_generating_play_no_part():
    """Qwen2.5's configuration punishes repetition, and transformers keeps to the 50 likeliest tokens by itself."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, seed=3)
    greedy = greedy_responses(model, tokenizer, ["Say it"], max_new_tokens=20)
    own = model.generation_config
    own.repetition_penalty, own.suppress_tokens, own.top_k = 1.8, list(range(60, 200)), 1
    assert greedy_responses(model, tokenizer, ["Say it"], max_new_tokens=20) == greedy
    said = [stream(model, tokenizer, "Say it", str, max_new_tokens=20, temperature=t) for t in (0.0, 1.0)]
    assert said[0].strip() == greedy[0]
    with torch.no_grad():
        likeliest = model(input_ids=torch.tensor([encode_prompt(tokenizer, "Say it")])).logits[0, -1].topk(50).indices
    torch.manual_seed(0)
    letters = [stream(model, tokenizer, "Say it", str, max_new_tokens=1, temperature=1.0) for _ in range(40)]
    within = {tokenizer.decode([number]) for number in likeliest}
    assert any(letter.isascii() and letter not in within for letter in letters if letter)
    assert model.generation_config is own


def test_answers_do_not_become_markdown(tmp_path):
    prompts, answers = ["# Title?"], {"teacher": ["# yes\n\n- <b>x</b>"], "before": [""], "after": ["ok"]}
    text = samples_text(prompts, answers)
    assert [line for line in text.splitlines() if line.startswith("#")] == ["# Samples", "## Prompt 1"]
    assert "    - <b>x</b>" in text and "student before:\n\n    (nothing)" in text
    write_samples(tmp_path / "samples.md", prompts, answers)
    assert (tmp_path / "samples.md").read_text() == text
    write_samples(tmp_path / "none.md", [], {})
    assert not (tmp_path / "none.md").exists()


# ---------------------------------------------------------------- curves


def rows(count=12):
    for step in range(1, count + 1):
        row = {"step": step, "loss": 4 / step, "kl": 3.5 / step, "agreement": 0.5 - 0.4 / step, "learning_rate": 1e-4}
        if step % 5 == 0:
            row |= {"eval_kl": 3.7 / step, "eval_agreement": None}
        yield row


def test_curves_draw_what_there_is(tmp_path):
    path = tmp_path / "curves.svg"
    assert draw_curves(list(rows()), path, "run <x> & \u202e") is True
    root = ElementTree.parse(path).getroot()
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert "run <x> & \\u202e" in texts and {"training", "held out", "loss (nats a token)", "learning rate"} <= set(
        texts
    )
    titles = {"KL to teacher (nats a token)", "agreement with teacher (%)"}
    assert titles <= set(texts) and "prefers-color-scheme: dark" in path.read_text() and "var(" not in path.read_text()
    assert draw_curves([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], path)
    smaller = ElementTree.parse(path).getroot()
    width, less = (float(drawing.get("width").removesuffix("pt")) for drawing in (root, smaller))
    assert less < width, "one figure needs one chart, not a page of empty ones"
    assert draw_curves(
        [{"step": 1, "loss": None, "kl": 1.0, "eval_kl": 2.0}, {"kl": 3.0}, {"step": 2, "kl": 3.0}], path
    )
    assert [file.name for file in tmp_path.iterdir()] == ["curves.svg"]


def test_a_picture_of_one_theme_has_no_other(tmp_path):
    for theme in ("light", "dark"):
        draw_curves(list(rows()), tmp_path / theme, keys=("kl",), theme=theme)
    light, dark = ((tmp_path / theme).read_text() for theme in ("light", "dark"))
    assert "@media" not in light + dark and light.count("<path") == dark.count("<path")
    for palette, inside, outside in ((LIGHT, light, dark), (DARK, dark, light)):
        assert palette["paper"] in inside and palette["paper"] not in outside


@pytest.mark.parametrize("nothing", [[], [{"step": 1}], [{"loss": 1.0}], [{"step": 1, "loss": 1.0}]])
def test_nothing_to_draw_makes_no_file(nothing, tmp_path):
    assert draw_curves(nothing, tmp_path / "curves.svg") is False
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_a_line_says_how_to_get_curves(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw_curves(list(rows()), tmp_path / "curves.svg") is False
    assert "pip install 'distill-toolkit[plots]'" in capsys.readouterr().out and not list(tmp_path.iterdir())


# ---------------------------------------------------------------- model card

HOSTILE = [
    "a](http://evil.example) [b",
    "<script>alert(1)</script>",
    "x\n---\nlicense: mit\n---\n# Owned",
    "`code` **bold** | cell | ![i](http://x/y.png)",
    "{{ template }} $math$ &lt;",
    "\u202egnp.evil\u0000",
]


def card(tmp_path, text="plain", recipe="name: plain", **more):
    path = write_model_card(
        tmp_path, name=text, teacher=text, student=text, data=text, recipe=recipe, versions={"torch": text}, **more
    )
    return path.read_text()


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_stay_text(text, tmp_path):
    written = card(tmp_path, text, recipe=f"name: x\n# ```\n# ````\n{text}", hub_models=(text,))
    _, head, body = written.split("---\n", 2)
    assert "base_model" not in yaml.safe_load(head) and yaml.safe_load(head)["license"] == "unknown"
    prose = re.sub(r"^(`{3,})\w*\n.*?\n\1$", "", body, flags=re.M | re.S)
    assert "<script" not in prose.replace("\\<", "") and "# Owned" not in re.findall(r"^#.*", prose, flags=re.M)
    assert not re.search(r"(?<!\\)\]\(", prose), "a link came alive"
    assert len(re.findall(r"(?<!\\)\|", prose.splitlines()[prose.splitlines().index("|---|---|") + 1])) == 3
    assert "\u202e" not in prose and "\x00" not in prose


def test_a_fence_is_longer_than_any_inside():
    assert code_block("```\nx\n`````", "yaml").startswith("``````yaml\n")
    assert escape("plain-name 1.5") == "plain-name 1.5"


def test_the_model_card_has_the_measured_metrics(tmp_path):
    written = card(tmp_path, before=BEFORE, after=AFTER, hub_models=("meta-llama/Llama-3.1-8B", "runs/a/b", "x y"))
    head = yaml.safe_load(written.split("---\n")[1])
    assert head["base_model"] == ["meta-llama/Llama-3.1-8B"] and head["library_name"] == "transformers"
    assert "| student before | 4.0000 | 3.0000 | 25.0 % | 148.41 |" in written
    assert "| student after | 1.0000 | 1.2000 | 62.5 % | 20.09 |" in written
    assert "| teacher | 0 | 0 | 100 % | 7.39 |" in written
    assert "75.0 %" in written and "2,048 held-out tokens" in written
    assert "Held-out figures" not in card(tmp_path)
