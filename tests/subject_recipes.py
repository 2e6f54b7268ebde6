"""Recipes of the kinds of teachers, with models and texts, for the invariant tests."""

import json

from tiny import save_models, save_tiny, tiny_model
from two_tokenizers import MERGED, PIECES

COMMON = "train: {steps: 6, batch_size: 2, device: cpu}\n"
TEXT = "data: {source: text.txt, max_length: 64, cache: false}\n" + COMMON
RECIPES = {
    "one": "teacher: {model: teacher}\nstudent: {from_teacher: {layers: 3}}\n" + TEXT,
    "launched": "teacher: {model: teacher}\nparallel: {teacher: served, teacher_gpus: 1}\n"
    "student: {from_teacher: {layers: 3}}\n" + TEXT,
    "kept": "teacher: {model: teacher, keep: kept}\nstudent: {from_teacher: {layers: 3}}\n" + TEXT,
    "answering": "teacher: {model: teacher}\nstudent: {from_teacher: {layers: 3}}\n"
    "data: {source: chat.jsonl, max_length: 96, cache: false, on_policy: {fraction: 0.5, max_new_tokens: 6}}\n"
    "loss: {terms: [{type: reverse_kl}]}\n" + COMMON,
    "several": "teachers: [{model: teacher, weight: 3}, {model: other}]\nstudent: {from_teacher: {layers: 3}}\n" + TEXT,
    "across": "teacher: {model: merged}\nstudent: {model: pieces, vocabulary: cross, lora: {r: 2, head: true}}\n"
    + TEXT,
    "informed": "teacher: {type: student, context: {template: 'A hint. {hint}'}}\nstudent: {model: teacher}\n"
    "data: {source: chat.jsonl, max_length: 192, cache: false, on_policy: {fraction: 0.5, max_new_tokens: 6}}\n"
    "loss: {terms: [{type: reverse_kl}]}\n" + COMMON,
    "routed": "teachers: [{model: teacher, route: even}, {model: other, route: odd}]\n"
    "student: {from_teacher: {layers: 3}}\ndata: {source: chat.jsonl, max_length: 96, cache: false, fields: "
    "{teacher: domain}, on_policy: {fraction: 0.5, max_new_tokens: 6}}\nloss: {terms: [{type: reverse_kl}]}\n" + COMMON,
    "served": "teacher: {type: server, url: '%s'}\nstudent: {model: %s/student}\n" + TEXT,
    "bucket": "teacher: {type: cache, path: %s}\nstudent: {model: %s/student}\n"
    "data: {source: %s/text.txt, max_length: 48, cache: false, validation: {fraction: 0.1}}\n" + COMMON,
}


def write_recipes(root, caches, served):
    """Models, texts and `RECIPES` in a folder, which is given back."""
    save_models(root, teacher={"layers": 4, "seed": 1}, other={"layers": 3, "hidden": 64, "seed": 5})
    save_tiny(root / "merged", tiny_model(MERGED, 3, 64, seed=1), MERGED)
    save_tiny(root / "pieces", tiny_model(PIECES, 3, seed=3, tie=False), PIECES)
    lines = [f"The teacher explains line {n} and the student listens to it once more." for n in range(40)]
    (root / "text.txt").write_text("\n".join(lines))
    chats = [
        {
            "messages": [{"role": "user", "content": line}, {"role": "assistant", "content": "It does."}],
            "hint": f"Say that {line.split()[-3]} does {len(line)} times.",
            "domain": "odd" if number % 2 else "even",
        }
        for number, line in enumerate(lines)
    ]
    (root / "chat.jsonl").write_text("\n".join(map(json.dumps, chats)))
    cache, _ = caches.store(1.0, k=8)
    for name, text in RECIPES.items():
        text = text % (cache.folder, caches.folder, caches.folder) if name == "bucket" else text
        text = text % (served.url, served.folder) if name == "served" else text
        (root / f"{name}.yaml").write_text(text)
    return root
