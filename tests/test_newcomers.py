"""What people stumble on who come from elsewhere: other names, small data, runs that do not compare."""

import pytest
from test_data import load, own_cache, texts  # noqa: F401
from test_recipe import MINIMAL
from tiny import tiny_tokenizer

from distill.recipe import Recipe, RecipeError, parse


@pytest.mark.parametrize(
    "override, expected",
    [
        ("train.lr=1e-4", "train.lr: unknown field; did you mean train.learning_rate?"),
        ("train.gradient_accumulation_steps=4", "did you mean train.tokens_per_step? tokens of a whole step"),
        ("student.lora.target_modules=[q_proj]", "did you mean student.lora.targets?"),
        ("train.bf16=true", "did you mean train.precision? one of float32, bfloat16, float16"),
        ("data.format=sharegpt", "came 'sharegpt'; did you mean chat?"),
        ("student.lora=16", "came 16; as in student.lora: {r: 16}"),
        ("lora=16", "lora: unknown field; did you mean student.lora? as in student.lora: {r: 16, alpha: 32}"),
        ("data.path=chats.jsonl", "did you mean data.source?"),
        ("micro_batch_size=2", "did you mean train.batch_size?"),
        ("teacher.torch_dtype=auto", "did you mean teacher.dtype?"),
        ("teacher.dtype=bf16", "came 'bf16'; did you mean bfloat16?"),
        ("train.lr-scheduler=cosine", "did you mean train.schedule?"),
        ("load_in_4bit=true", "unknown field; a frozen model in 8 bits is teacher.dtype: int8 or fp8"),
        ("train.max_length=64", "unknown field; did you mean data.max_length?"),
        ("loss.alpha=0.5", "the loss is the plain weighted sum of loss.terms"),
        ("loss.terms=[{type: rkl}]", "unknown type 'rkl'; did you mean reverse_kl?"),
        ("loss.terms=[forward_kl]", "as in loss.terms: [{type: forward_kl}]"),
    ],
)
def test_names_of_other_tools_get_their_cure(override, expected):
    with pytest.raises(RecipeError) as error:
        parse(MINIMAL, [override])
    assert expected in str(error.value)


def test_the_tables_of_foreign_names_lead_to_fields_and_values_that_exist():
    import dataclasses

    from transformers import TrainingArguments

    from distill.core.faults import _literals, _paths
    from distill.recipe.aliases import ALIASES, SHORT, VALUES

    fields = set(_paths(Recipe)) | {"--resume", "--name", ""}
    fields |= {f"train.arguments.{field.name}" for field in dataclasses.fields(TrainingArguments)}
    assert {name for name, alias in ALIASES.items() if alias.field not in fields or not any(alias)} == set()
    assert set(ALIASES) & fields == {"output_dir"}, "a name that is ours already, at the same place"
    assert set(SHORT) <= fields
    for field, values in VALUES.items():
        paths = ["loss.terms.type"] if field == "type" else [p for p in fields if p.rpartition(".")[2] == field]
        options = {option for path in paths for option in _literals(Recipe, path.split("."))}
        ours = {value.split(" ")[0] for value in values.values()} - {"fp8", "int8"}  # one table for all dtypes
        assert options and ours <= options, field
        assert set(values) & options <= {"transformers"}, field


def test_the_seed_orders_rows_and_another_one_chooses_those_held_out(tmp_path):
    source, tokenizer = texts(tmp_path / "a.jsonl", 60), tiny_tokenizer()

    def rows(seed, split=0, **more):
        splits = load(source, tokenizer, seed, validation={"fraction": 0.2, "seed": split}, **more)
        return [[row["input_ids"] for row in part] for part in (splits.train, splits.validation)]

    (train, held_out), (other_train, same), (_, other) = rows(0), rows(5), rows(0, 5)
    assert held_out == same and train != other_train and sorted(train) == sorted(other_train)
    assert sorted(held_out) != sorted(other)
    assert rows(0, packing=True)[1] == rows(5, packing=True)[1], "packed alike, so that figures are the same bits"
    random = [load("synthetic", None, seed, vocab_size=90) for seed in (0, 5)]
    assert [*random[0].validation] == [*random[1].validation]
