"""Subjects of the invariant tests: several teachers, two tokenizers, a cached teacher, an on-policy student."""

import contextlib
import functools
import os
from dataclasses import replace

import numpy as np
import torch
from tiny import save_tiny, tiny_model, tiny_tokenizer
from two_tokenizers import WORDS, readers

from distill.commands.cache_epoch import load, make_cache
from distill.data.formats import RowFormat
from distill.doctor.check_setup import CheckSetup
from distill.doctor.remote_outputs import OUTPUT_READERS
from distill.doctor.rollouts import StudentRollouts, prompts_of
from distill.doctor.rows import join_rows, nearest_in_length, split_row
from distill.generation.sampling import Sampling
from distill.recipe import parse
from distill.recipe.loss import Loss
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.backends.served.launched import Child, LaunchedPlan, LaunchedServers, LaunchedTeacher
from distill.teachers.backends.served.teacher import ServerTeacher
from distill.teachers.backends.stored.settings import CacheOptions
from distill.teachers.backends.stored.store import Fills, Store
from distill.teachers.backends.stored.teacher import StoredTeacher
from distill.teachers.backends.student import AveragedTeacher
from distill.teachers.combination.mixture import MixtureTeacher
from distill.teachers.combination.routes import RoutedTeacher
from distill.teachers.load_context import load_context
from distill.teachers.rows.context.teacher import ContextTeacher
from distill.teachers.rows.retokenised.encode import PairEncoder
from distill.teachers.rows.retokenised.teacher import CrossTeacher
from distill.teachers.rows.retokenised.vocabularies import compare_by_bytes

TWO_TERMS = {"temperature": 2.0, "terms": [{"type": "jsd", "beta": 0.3}, {"type": "cross_entropy", "weight": 0.5}]}
KL_AND_LABELS = {
    "temperature": 2.0,
    "terms": [{"type": "forward_kl", "weight": 0.7}, {"type": "cross_entropy", "weight": 0.5}],
}


def rows(count=6):
    """Packed rows of two documents, of different lengths, with different shares of trained tokens."""
    generator = torch.Generator().manual_seed(4)
    made = []
    for number in range(count):
        length = 10 + 3 * (number % 4)
        ids = torch.randint(3, 250, (length,), generator=generator).tolist()
        half = length // 2
        labels = [-100, *ids[1:half], -100, *ids[half + 1 :]]
        for masked in range(1, 1 + number % 3):
            labels[masked] = -100
        made.append({"input_ids": ids, "labels": labels, "position_ids": [*range(half), *range(length - half)]})
    return made


def several(loss=None, weights=(3.0, 1.0)):
    """Two teachers of different widths, one with a soft cap; the student's head is wider than theirs."""
    tokenizer = tiny_tokenizer()
    teachers = [
        tiny_model(tokenizer, hidden=64, seed=1),
        tiny_model(tokenizer, seed=2, kind="gemma2", final_logit_softcapping=5.0),
    ]
    return CheckSetup(
        tiny_model(tokenizer, vocab_size=272),
        MixtureTeacher(teachers, weights),
        rows(),
        Loss.model_validate(loss or TWO_TERMS),
        weights=weights,
        tokenizers=(tokenizer,) * 3,
    )


@functools.cache
def read_by_two(student="pieces", teacher="merged"):
    """Rows of two documents each as two tokenizers read them."""
    both = readers(student, teacher)
    encoder = PairEncoder(*both, RowFormat("text", {"text": "text"}), max_length=30)
    pairs, _ = encoder([(0, {"text": WORDS[:160]}), (1, {"text": WORDS[200:330]}), (2, {"text": WORDS[-120:]})])
    documents = []
    for pair in pairs:
        spans = pair.spans.reshape(-1, 4)
        labels = np.full(len(pair.student), -100)
        labels[spans[:, 0]] = pair.student[spans[:, 0]]
        documents.append(
            {
                "input_ids": pair.student.tolist(),
                "labels": labels.tolist(),
                "position_ids": list(range(len(pair.student))),
                "teacher_input_ids": pair.teacher.tolist(),
                "teacher_position_ids": list(range(len(pair.teacher))),
                "spans": spans.ravel().tolist(),
            }
        )
    return both, [join_rows(documents[at : at + 2]) for at in range(0, min(len(documents), 8), 2)]


def across(loss=None):
    both, made = read_by_two()
    student, teacher = both
    return CheckSetup(
        tiny_model(student.tokenizer, 1, seed=3),
        CrossTeacher(
            tiny_model(teacher.tokenizer, 2, 64, seed=1, kind="gemma2", final_logit_softcapping=9.0),
            compare_by_bytes(student, teacher).shared,
        ),
        made,
        Loss.model_validate(loss or TWO_TERMS),
        tokenizers=(teacher, student),
    )


class Caches:
    """Makes subjects with a teacher on disk; what it said is stored once for each kind."""

    def __init__(self, folder):
        self.folder, self.tokenizer, self.stored = folder, tiny_tokenizer(), {}
        for name, seed in (("teacher", 1), ("student", 2)):
            save_tiny(folder / name, tiny_model(self.tokenizer, seed=seed), self.tokenizer)
        lines = (f"The teacher explains line {n}; {'so ' * (n % 5)}" for n in range(30))
        (folder / "text.txt").write_text("\n".join(lines))

    def recipe(self, *overrides):
        """Recipe of the run that trains from the cache, with the teacher still loaded."""
        return parse(
            f"""
            teacher: {{model: {self.folder}/teacher}}
            student: {{model: {self.folder}/student}}
            data: {{source: {self.folder}/text.txt, max_length: 48, cache: false, validation: {{fraction: 0.1}}}}
            train: {{steps: 6, batch_size: 2, device: cpu}}
            generate: {{prompts: []}}
            """,
            overrides,
        )

    def store(self, temperature, **settings):
        """The cache at a temperature and the training rows."""
        place = self.folder / "-".join(map(str, (temperature, *settings.values())))
        if place not in self.stored:
            loaded = load(self.recipe(f"loss.temperature={temperature}"))
            make_cache(loaded, place, CacheOptions(**settings).checked(), say=lambda line: None, progress=Silent)
            self.stored[place] = Store(place), loaded.splits.train
        return self.stored[place]

    def subject(self, kind):
        """One of CACHED."""
        at_temperature_1 = {"temperature": 1.0, "terms": KL_AND_LABELS["terms"]}
        loss, settings = {
            "bucket": (at_temperature_1, {"k": 8}),
            "renormalize": (KL_AND_LABELS, {"k": 8, "tail": "renormalize"}),
            "sampled": (KL_AND_LABELS, {"k": 12, "tail": "sampled"}),
            "hidden": (TWO_TERMS, {"hidden": True}),
        }[kind]
        cache, train = self.store(1.0 if kind == "hidden" else loss["temperature"], **settings)
        # the last row holds one document: rows of equal counts would hide a mean of means
        documents = nearest_in_length([part for row in train for part in split_row(row)], 7, 64)
        return CheckSetup(
            tiny_model(self.tokenizer, seed=2),
            StoredTeacher(cache),
            [join_rows(documents[at : at + 2]) for at in range(0, 7, 2)],
            Loss.model_validate(loss),
            tokenizers=(self.tokenizer, self.tokenizer),
        )


class Served:
    """Makes subjects whose teacher is behind HTTP in this process; other processes reach it, too."""

    def __init__(self, folder):
        from served import engine_in, serving, write_models

        self.folder = write_models(folder, kind="gemma2", final_logit_softcapping=5.0)
        self.stack = contextlib.ExitStack()
        self.url = self.stack.enter_context(serving(engine_in(folder)))

    def launched(self):
        """The same teacher, as a run that has started this server has it."""
        from served import recipe_in

        address = self.folder / "address"
        address.write_text(self.url)
        servers = LaunchedServers([Child(os.getpid(), str(address), os.devnull)], "any", 1, sharded=False)
        recipe = recipe_in(self.folder, "parallel={teacher: served, teacher_gpus: 1}")
        OUTPUT_READERS[LaunchedTeacher] = OUTPUT_READERS[ServerTeacher]  # doctor itself, one process, loads it
        return LaunchedTeacher(LaunchedPlan(recipe), servers, load_context(recipe))

    def subject(self, kind):
        """One of SERVED, or `launched`."""
        from served import opened, recipe_in

        if kind == "launched":
            tokenizer = tiny_tokenizer()
            student, loss = tiny_model(tokenizer, seed=2), Loss.model_validate(TWO_TERMS)
            return CheckSetup(student, self.launched(), rows(), loss, tokenizers=(tokenizer, tokenizer))
        top_k = ["teacher.top_k=8", "loss.terms.0.type=reverse_kl"] if kind == "served top k" else []
        teacher, vocabulary = opened(
            recipe_in(self.folder, "teacher={type: server}".replace("}", f", url: '{self.url}'}}"), *top_k)
        )
        loss = {"terms": [{"type": "reverse_kl"}]} if top_k else TWO_TERMS
        tokenizer = vocabulary.tokenizer
        return CheckSetup(
            tiny_model(tokenizer, seed=2), teacher, rows(), Loss.model_validate(loss), tokenizers=(tokenizer, tokenizer)
        )


class Silent:
    """Progress that nobody sees."""

    def __init__(self, total):
        pass

    def __enter__(self):
        return lambda positions: None

    def __exit__(self, *_):
        return None


def one(loss=None):
    """One teacher; its student's rows are shorter than they could be."""
    tokenizer = tiny_tokenizer()
    return CheckSetup(
        tiny_model(tokenizer),
        tiny_model(tokenizer, hidden=64, seed=1),
        rows(),
        Loss.model_validate(loss or {"terms": [{"type": "jsd"}]}),
        tokenizers=(tokenizer, tokenizer),
    )


def with_answers(subject, prompts=False):
    """The subject with its student's answers, two a row; with `prompts` after the first tokens of each."""
    rollouts = StudentRollouts("distill", 0.5, Sampling(1.0), 3, 64, 6, 2, 64, (0,), 259)
    documents = subject.documents()
    for number, document in enumerate(documents if prompts else ()):
        document["labels"][: 1 + number % 3] = [-100] * (1 + number % 3)
    batch = subject.batch(documents)
    answers = rollouts.with_responses(subject.student, [batch])
    made = [join_rows(answers[at : at + 2]) for at in range(0, len(answers), 2)]
    return replace(subject, rows=made, rollouts=rollouts, prompts=prompts_of(batch))


def answering(loss=None):
    """A student that answers: its answers after the data's prompts, two documents a row."""
    subject = one(loss or {"terms": [{"type": "reverse_kl"}]})
    return with_answers(subject, prompts=True)


def informed(loss=None, ema=None):
    """A teacher that reads one to five tokens more before each answer, in another place than the student's prompt."""
    subject = one(loss or TWO_TERMS)
    made = []
    for number, document in enumerate(subject.documents()):
        ids, labels = document["input_ids"], document["labels"]
        first = next(at for at, label in enumerate(labels) if label != -100)
        other = [*ids[: first // 2], *range(250, 251 + number % 5), *ids[first // 2 :]]
        made.append(document | {"teacher_input_ids": other, "teacher_position_ids": list(range(len(other)))})
    joined = [join_rows(made[at : at + 2]) for at in range(0, len(made), 2)]
    (teacher,) = subject.teacher.models.values()
    return replace(
        subject, teacher=ContextTeacher(teacher if ema is None else AveragedTeacher(teacher, ema)), rows=joined
    )


def informed_answering():
    """The same of a student that answers: what the teacher reads before stays before its answers."""
    subject = informed({"terms": [{"type": "reverse_kl"}]})
    return with_answers(subject)


def several_informed():
    subject = several()
    first, second = subject.teacher.members
    return replace(subject, teacher=MixtureTeacher([ContextTeacher(first), second], (3.0, 1.0)), rows=informed().rows)


def routed(loss=None):
    """Two routes, one of them a mixture; rows that hold documents of one and of both."""
    subject = several(loss)
    tokenizer = tiny_tokenizer()
    other = tiny_model(tokenizer, hidden=48, seed=7)
    made = [part | {"route": [number % 3 % 2]} for number, part in enumerate(subject.documents())]
    teachers = list(subject.teacher.models.values())
    members = [
        LoadedTeacher(other, field="teachers.0"),
        MixtureTeacher(
            [LoadedTeacher(model, field=f"teachers.{number}") for number, model in enumerate(teachers, 1)], (3.0, 1.0)
        ),
    ]
    return replace(
        subject,
        teacher=RoutedTeacher(members, ["code", "talk"]),
        weights=(1.0, 0.75, 0.25),
        rows=[join_rows(made[at : at + 2]) for at in range(0, len(made), 2)],
        tokenizers=(tokenizer,) * 4,
    )


def routed_answering():
    """The same of a student that answers: an answer's teacher is its prompt's."""
    subject = routed({"terms": [{"type": "reverse_kl"}]})
    return with_answers(subject, prompts=True)


def routed_informed():
    """Three routes: a teacher, one that reads more before each answer, and a mixture."""
    subject, plain = informed({"terms": [{"type": "reverse_kl"}]}), routed()
    code, talk = plain.teacher.members
    (model,) = subject.teacher.models.values()
    own = ContextTeacher(LoadedTeacher(model, field="teachers.3"))
    made = [part | {"route": [number % 3]} for number, part in enumerate(subject.documents())]
    for part in made:
        if part["route"] != [1]:
            part |= {f"teacher_{name}": part[name] for name in ("input_ids", "position_ids")}
    return replace(
        subject,
        teacher=RoutedTeacher([code, own, talk], ["code", "own", "talk"]),
        weights=(1.0, 1.0, 0.75, 0.25),
        rows=[join_rows(made[at : at + 2]) for at in range(0, len(made), 2)],
        tokenizers=(plain.tokenizers[0],) * 5,
    )


def routed_across(loss=None):
    """Three routes: a teacher with another tokenizer, and two of the student's, one of which gives hidden states."""
    both, made = read_by_two("bytes", "merged")
    student, teacher = both
    documents = []
    for number, part in enumerate(part for row in made for part in split_row(row)):
        part["route"] = [number % 3]
        if number % 3:  # the student's tokens
            ids = part["input_ids"]
            part |= {"labels": [-100, *ids[1:]], "spans": [], "answer_starts": []}
            part |= {f"teacher_{name}": part[name] for name in ("input_ids", "position_ids")}
        documents.append(part)
    members = [
        CrossTeacher(
            LoadedTeacher(
                tiny_model(teacher.tokenizer, 2, 64, seed=1, kind="gemma2", final_logit_softcapping=9.0),
                field="teachers.0",
            ),
            compare_by_bytes(student, teacher).shared,
        ),
        LoadedTeacher(tiny_model(student.tokenizer, hidden=48, seed=7), field="teachers.1"),
        LoadedTeacher(tiny_model(student.tokenizer, seed=5), field="teachers.2"),
    ]
    return CheckSetup(
        tiny_model(student.tokenizer, 1, seed=3),
        RoutedTeacher(members, ["other", "same", "too"]),
        [join_rows(documents[at : at + 2]) for at in range(0, len(documents), 2)],
        Loss.model_validate(loss or TWO_TERMS),
        weights=(1.0, 1.0, 1.0),
        tokenizers=(teacher, student.tokenizer, student.tokenizer, student),
    )


def routed_informed_answering():
    """The same of a student that answers: its answers keep their teacher and what that reads before them."""
    return with_answers(routed_informed())


def local_top_k(tail="bucket"):
    """One teacher, of whose distributions the student is given eight tokens and the rest as one."""
    subject = one(KL_AND_LABELS)
    inner, at = LoadedTeacher(subject.teacher.model), KL_AND_LABELS["temperature"]
    plan = {"kind": "top_k", "k": 8, "tail": tail, "dtype": "float32", "hidden": 64, "vocabulary": 259, "seed": 0}
    plan |= {"temperature": at, "scale": 1.0, "softcap": None}
    return replace(subject, teacher=StoredTeacher(Store(None, Fills(plan)), inner))


def routed_top_k():
    """Two routes, one of which gives K tokens of each distribution."""
    subject, one_of = routed(KL_AND_LABELS), local_top_k()
    (model,) = one_of.teacher.models.values()
    code, _ = subject.teacher.members
    few = StoredTeacher(Store(None, Fills(one_of.teacher.store.manifest)), LoadedTeacher(model, field="teachers.1"))
    names = ["code", "talk"]
    student = tiny_model(tiny_tokenizer())
    teacher, tokenizers = RoutedTeacher([code, few], names), (tiny_tokenizer(),) * 3
    return replace(subject, student=student, teacher=teacher, weights=(1.0, 1.0), tokenizers=tokenizers)


def kept():
    """One teacher, whose hidden states go through a store that holds them for a batch."""
    subject = one(TWO_TERMS)
    inner = LoadedTeacher(subject.teacher.model)
    plan = {"kind": "hidden", "dtype": "float32", "hidden": 64, "vocabulary": 259, "seed": 0}
    return replace(subject, teacher=StoredTeacher(Store(None, Fills(plan)), inner))


CACHED = ("bucket", "renormalize", "sampled", "hidden")
SERVED = ("served", "served top k")
SUBJECTS = {"one": one, "answering": answering, "several": several, "across": across}
SUBJECTS["drawing"] = lambda: answering({"terms": [{"type": "policy_gradient"}, {"type": "jsd", "weight": 0.3}]})
# off-policy, with hard labels and warm: what the policy gradient never is
STUDENT_TOP_K = {
    "temperature": 2.0,
    "terms": [{"type": "top_k_reverse_kl", "k": 8, "weight": 0.7}, {"type": "cross_entropy", "weight": 0.5}],
}
SUBJECTS["student top k"] = lambda: one(STUDENT_TOP_K)
SUBJECTS |= {"kept": kept, "informed": informed, "informed answering": informed_answering}
# by the kind of teacher
KINDS = {"model": ["one", "answering", "drawing", "student top k"], "mixture": ["several"], "cross": ["across"]}
SUBJECTS |= {"routed": routed, "routed answering": routed_answering, "several informed": several_informed}
KINDS |= {"context": ["informed", "informed answering"], "routed": ["routed", "routed answering"]}
SUBJECTS |= {"routed informed": routed_informed, "routed informed answering": routed_informed_answering}
KINDS["mixture"] += ["several informed"]
SUBJECTS |= {"routed across": routed_across, "local top k": local_top_k, "routed top k": routed_top_k}
KINDS["model"] += ["local top k"]
KINDS["routed"] += ["routed informed", "routed informed answering", "routed across", "routed top k"]
KINDS |= {"keep": ["kept"], "cache": list(CACHED), "server": list(SERVED), "launched": ["launched"]}
