"""`python -m scripts.study.gold`: the loss across two tokenizers beside GOLD's of TRL, and tokens per second of a step.

Both losses take the same student, teacher and answers of the student (tiny models of random weights, reverse KL, fp32,
one thread). GOLD (General On-policy Logit Distillation) is `ULDLoss` of `trl.experimental.gold` with the settings that
come nearest: `uld_token_merge_strategy="bayesian"`, which compares the distributions that predict a token rather than
those after it, `uld_use_hybrid_loss`, weights 1 and 1, and end-of-sequence tokens not skipped. Three cases:

    one vocabulary   the teacher has the student's tokenizer: all tokens are matched, all spans one token of each
    shared words     two vocabularies; the answers are words that are one token of both
    any answer       two vocabularies; the answers are what the student draws, cut differently by the two

GOLD's matched part compares parts of distributions by sum p log(p / q), which is not 0 at least and whose minimum is
not where p = q. Here each outcome has p log(p / q) - p + q. The two differ by the difference of both models' mass on
matched tokens, column `mass`, with which the first two cases are equal. Needs trl (1.16).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from distill.data.collator import Collator
from distill.generation.documents import RolloutDocument, as_row
from distill.generation.engines import engine_for, settings_for
from distill.generation.sampling import Sampling
from distill.teachers.objective import DistillationObjective
from distill.teachers.rows.retokenised.answers import TeacherReader
from distill.teachers.rows.retokenised.encode import TokenisedReader
from distill.teachers.rows.retokenised.teacher import CrossTeacher
from distill.teachers.rows.retokenised.vocabularies import compare_by_bytes

ROOT = Path(__file__).resolve().parents[2]
END = "<end>"
CASES = ("one vocabulary", "shared words", "any answer")
QUESTIONS = 16
REPEATS = 7


class Model(NamedTuple):
    """A model with its tokenizer."""

    tokenizer: Any
    model: Any
    reader: TokenisedReader

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


class Case(NamedTuple):
    """Student, teacher, and the student's answers to some prompts, with the token that ends each unless it was cut."""

    student: Model
    teacher: Model
    prompts: Sequence[str]
    answers: Sequence[Sequence[int]]

    def documents(self) -> list[RolloutDocument]:
        """Return the documents of both tokenizers that training makes of the answers."""
        read, made = TeacherReader(self.student.reader, self.teacher.reader), []
        for row, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True)):
            own, other = self.student.ids(prompt), self.teacher.ids(prompt)
            ids, others = [*own, self.student.reader.end], [*other, self.teacher.reader.end]
            span = (len(own), len(own) + 1, len(other), len(other) + 1)
            asked = RolloutDocument(ids, ids, row, others, spans=[span], starts=(len(own), len(other)))
            made.append(asked.with_retokenized_response(read, answer, 512))
        return made


class Losses(NamedTuple):
    """Losses of a case, means over aligned spans.

    Attributes:
        spans: how many there are.
        single: those of one token each.
        ours: the loss of `student.vocabulary: cross`.
        gold: GOLD's matched and unmatched parts, added.
        mass: the teacher's less the student's mass on matched tokens.
        usual: GOLD with its defaults of merging and weights.
        gradient: relative difference of the gradients of `ours` and of `gold` with `mass`.
    """

    spans: int
    single: int
    ours: float
    gold: float
    mass: float
    usual: float
    gradient: float


def make_model(text: str, vocab_size: int, hidden: int, seed: int) -> Model:
    """Return a model of random weights, with a byte-level BPE tokenizer of the characters of a text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end = AddedToken(END, special=True, normalized=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[end], show_progress=False)
    backend.train_from_iterator([text], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.1,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return Model(tokenizer, model, TokenisedReader(tokenizer, None, "student.model"))


def make_cases(vocab_size: int = 1500, new: int = 48) -> dict[str, Case]:
    """Return the cases by name; texts are this repository's guides, with characters of ASCII."""
    guides = [path.read_text() for path in sorted((ROOT / "docs" / "guides").glob("*.md"))]
    text = "".join(character for character in "\n".join(guides) if character.isascii())
    half = len(text) // 2
    student = make_model(text, vocab_size, 64, seed=1)
    teacher = make_model(text[:half] + "".join(sorted(set(text))), 2 * vocab_size, 128, seed=2)
    twin = make_model(text, vocab_size, 128, seed=3)
    lines = [line for line in text.splitlines() if 40 < len(line) < 120 and line[:1].isalpha()]
    prompts = [line.rstrip() for line in lines[:: len(lines) // QUESTIONS][:QUESTIONS]]
    drawn = draw(student, prompts, new)
    words = set(one_token_words(student)) & set(one_token_words(teacher))
    said = draw_words(student, prompts, sorted(words), new)
    canonical = [as_encoded(student, ids) for ids in drawn]
    each = ((twin, canonical), (teacher, said), (teacher, drawn))
    return {name: Case(student, other, prompts, answers) for name, (other, answers) in zip(CASES, each, strict=True)}


def one_token_words(model: Model) -> list[str]:
    """Return the words that are one token after a space."""
    texts = (str(model.tokenizer.decode([number])) for number in range(len(model.tokenizer)))
    return [text for text in texts if text[:1] == " " and text[1:].isalpha() and len(model.ids(text)) == 1]


def draw(student: Model, prompts: Sequence[str], new: int) -> list[list[int]]:
    """Return answers as training draws them, of at most `new` tokens."""
    settings = settings_for(student.model, student.tokenizer, None)
    answers = engine_for("distill", student.model, settings, tokenizer=student.tokenizer).generate(
        [student.ids(prompt) for prompt in prompts],
        max_new_tokens=[new] * len(prompts),
        sampling=Sampling(1.0),
        seeds=list(range(len(prompts))),
        batch_size=len(prompts),
    )
    return answers.tokens


def as_encoded(student: Model, ids: Sequence[int]) -> list[int]:
    """Return the tokens that the tokenizer gives a drawn text, with its end."""
    text = str(student.tokenizer.decode(ids, skip_special_tokens=True))
    end = student.reader.end
    words = student.ids(text)
    return [*words, end] if ids[-1] == end else words


@torch.no_grad()
def draw_words(student: Model, prompts: Sequence[str], words: Sequence[str], new: int) -> list[list[int]]:
    """Return answers of words of a list, drawn by the student, and the end of the text."""
    ids = torch.tensor([student.ids(word)[0] for word in words])
    generator, answers = torch.Generator().manual_seed(0), []
    for prompt in prompts:
        answer = list[int]()
        for _ in range(new // 2):
            logits = student.model(torch.tensor([[*student.ids(prompt), *answer]])).logits[0, -1, ids]
            answer.append(int(ids[torch.multinomial(logits.softmax(-1), 1, generator=generator)]))
        answers.append([*answer, student.reader.end])
    return answers


# ------------------------------------------------------------------- both


class Ours:
    """The loss of a case by `distill`, on one batch of rows without packing."""

    def __init__(self, case: Case) -> None:
        self.case = case
        shared = compare_by_bytes(case.student.reader, case.teacher.reader).shared
        self.objective = DistillationObjective(
            CrossTeacher(case.teacher.model, shared), case.student.model, "reverse_kl"
        )

    def loss(self) -> torch.Tensor:
        """Return the loss, from the answers' tokens on."""
        rows = [as_row([document]) for document in self.case.documents()]
        batch = Collator(0, omit_plain_positions=True, columns=self.objective.teacher.columns)(rows)
        return self.case.student.model(**self.objective.student_inputs(batch, statistics=False))["loss"]


class Gold:
    """GOLD's loss of a case; texts are given to the teacher's tokenizer as in its trainer's `compute_loss`."""

    def __init__(self, case: Case, **settings: Any) -> None:
        from trl.experimental.gold import GOLDConfig
        from trl.experimental.gold.gold_trainer import ULDLoss

        nearest = {
            "uld_token_merge_strategy": "bayesian",
            "uld_hybrid_matched_weight": 1.0,
            "uld_hybrid_unmatched_weight": 1.0,
            "uld_skip_student_eos": False,
            "uld_skip_teacher_eos": False,
        }
        config = GOLDConfig(
            output_dir="",
            use_uld_loss=True,
            uld_use_hybrid_loss=True,
            beta=1.0,
            report_to="none",
            use_cpu=True,
            bf16=False,
            **(nearest | settings),
        )
        self.case = case
        self.function = ULDLoss(config, case.student.tokenizer, case.teacher.tokenizer)

    def loss(self, numbers: Sequence[int] | None = None) -> torch.Tensor:
        """Return the mean over sequences of the means over their aligned groups; `numbers` of answers, None for all."""
        from trl.experimental.gold.gold_trainer import build_teacher_inputs_from_texts

        student, teacher = self.case.student, self.case.teacher
        own = [self._student_row(number) for number in (numbers or range(len(self.case.answers)))]
        prompts, texts = ([self.case.prompts[n] for n in (numbers or range(len(own)))], [text for *_, text in own])
        ids, labels, mask, offsets = build_teacher_inputs_from_texts(teacher.tokenizer, prompts, texts)
        with torch.no_grad():
            others = teacher.model(input_ids=ids, attention_mask=mask).logits
        padded = [
            nn.utils.rnn.pad_sequence([torch.tensor(row[at]) for row in own], batch_first=True, padding_value=value)
            for at, value in enumerate((0, -100, 0))
        ]
        mask = nn.utils.rnn.pad_sequence([torch.ones(len(row[0]), dtype=torch.bool) for row in own], batch_first=True)
        logits = student.model(input_ids=padded[0], attention_mask=mask, use_cache=False).logits
        return self.function(logits, others, padded[1], labels, padded[0], ids, padded[2], offsets)

    def _student_row(self, number: int) -> tuple[list[int], list[int], list[tuple[int, int]], str]:
        """Return ids, labels, places of the tokens in the answer's bytes, and its text without the end."""
        student, answer = self.case.student, list(self.case.answers[number])
        prompt, place, places = student.ids(self.case.prompts[number]), 0, list[tuple[int, int]]()
        for token in answer:
            length = 0 if token == student.reader.end else len(student.reader.spelled[token] or b"")
            places.append((place, place + length))
            place += length
        text = str(student.tokenizer.decode(answer, skip_special_tokens=True))
        return [*prompt, *answer], [-100] * len(prompt) + answer, [(0, 0)] * len(prompt) + places, text


def mass_of(case: Case, document: RolloutDocument, matched: dict[int, int]) -> torch.Tensor:
    """Return the sum over a document's spans of the teacher's less the student's mass on matched tokens."""
    student = case.student.model(torch.tensor([document.ids])).logits[0].softmax(-1)
    with torch.no_grad():
        teacher = case.teacher.model(torch.tensor([document.teacher_ids])).logits[0].softmax(-1)
    spans = torch.tensor(document.spans).reshape(-1, 4)
    own = student[spans[:, 0] - 1][:, list(matched.values())]
    return teacher[spans[:, 2] - 1][:, list(matched)].sum() - own.sum()


def compare(case: Case) -> Losses:
    """Return both losses of a case, over the same spans, and how far their gradients differ."""
    ours = Ours(case)
    loss = ours.loss()
    gradient = _gradient(case, loss)
    ours.objective.detach()
    gold, usual = Gold(case), Gold(case, **GOLD_DEFAULTS)
    documents, counts = case.documents(), []
    total, mass, plain = torch.zeros(()), torch.zeros(()), 0.0
    for number, document in enumerate(documents):
        count = len(document.spans or ())
        counts.append(count)
        total = total + gold.loss([number]) * count
        mass = mass + mass_of(case, document, gold.function._vocab_mapping)
        plain += usual.loss([number]).item() * count
    spans = sum(counts)
    other = _gradient(case, (total + mass) / spans)
    single = sum((b - a, d - c) == (1, 1) for document in documents for a, b, c, d in document.spans or ())
    return Losses(
        spans,
        single,
        loss.item(),
        total.item() / spans,
        mass.item() / spans,
        plain / spans,
        ((gradient - other).norm() / gradient.norm()).item(),
    )


GOLD_DEFAULTS: dict[str, Any] = {
    "uld_token_merge_strategy": "observed",
    "uld_hybrid_matched_weight": None,
    "uld_hybrid_unmatched_weight": None,
    "uld_skip_student_eos": True,
    "uld_skip_teacher_eos": True,
}


def _gradient(case: Case, loss: torch.Tensor) -> torch.Tensor:
    parameters = list(case.student.model.parameters())
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def tokens_per_second(case: Case) -> dict[str, float]:
    """Return the answers' tokens per second of a step: the teacher's reading, both models, the loss, its gradient."""
    found: dict[str, list[float]] = {"ours": [], "GOLD": []}
    tokens = sum(map(len, case.answers))
    for _ in range(REPEATS):
        for name, kind in (("ours", Ours), ("GOLD", Gold)):
            side = kind(case)
            seconds = timed(lambda side=side: side.loss().backward())
            case.student.model.zero_grad()
            if isinstance(side, Ours):
                side.objective.detach()
            found[name].append(tokens / seconds)
    return {name: statistics.median(values) for name, values in found.items()}


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report(cases: dict[str, Case]) -> Iterator[str]:
    """Yield the lines of a table, and of the speeds."""
    yield "| case | spans | one to one | ours | GOLD | mass | ours - GOLD - mass | gradient | GOLD by default |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, case in cases.items():
        found = compare(case)
        rest = found.ours - found.gold - found.mass
        yield (
            f"| {name} | {found.spans:,} | {found.single / found.spans:.1%} | {found.ours:.5f} | {found.gold:.5f} | "
            f"{found.mass:.5f} | {rest:.1e} | {found.gradient:.1e} | {found.usual:.5f} |"
        )
    yield ""
    for name, speed in tokens_per_second(cases[CASES[-1]]).items():
        yield f"{name}: {speed:,.0f} tokens/s of a step, {CASES[-1]}, one thread"


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--vocabulary", type=int, default=1500, help="tokens of the student; of the teacher twice as many"
    )
    parser.add_argument("--new", type=int, default=48, help="tokens of an answer")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for line in report(make_cases(args.vocabulary, args.new)):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
