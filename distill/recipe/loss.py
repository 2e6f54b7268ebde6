"""The `loss:` section of a recipe: a list of weighted terms, distinguished by `type`, whose sum is the loss.

With p_s and p_t the student's and the teacher's distributions at the temperature:

    forward_kl       KL(p_t || p_s)
    reverse_kl       KL(p_s || p_t)
    jsd              beta KL(p_t || m) + (1 - beta) KL(p_s || m), m = beta p_t + (1 - beta) p_s   (GKD)
    skew_forward_kl  KL(p_t || alpha p_t + (1 - alpha) p_s)                                       (DistiLLM)
    skew_reverse_kl  KL(p_s || alpha p_s + (1 - alpha) p_t)                                       (DistiLLM)
    tvd              half the sum of |p_t - p_s|
    cross_entropy    -log p_s[label] at temperature 1
    policy_gradient  -sg(log p_t[y] - log p_s[y]) p_s[y] / sg(p_s[y]) of the token y sampled from the student
    top_k_reverse_kl KL(p_s || p_t) over the student's top K tokens, all others merged into one outcome
    hidden_state, attention_relation, router    distances between layers of both models (layer_terms.py)
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, Self, get_args

from distill_kernels.losses import DIVERGENCES, with_parameter
from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, model_validator

from distill.core.errors import Section
from distill.recipe.fields import FUNCTION, SHA256, NotNegative, Text, Usual
from distill.recipe.layer_terms import (
    LAYERED,
    LAYERED_NAMES,
    AttentionRelationTerm,
    HiddenStateTerm,
    LayerTerm,
    RouterTerm,
    pairs_of,
)

Cap = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Temperature = Annotated[float, Field(gt=0), Usual(0.3, 10)]


class Clip(Section):
    """Caps on the value of a divergence, in nats, before its weight and the squared temperature.

    Beyond a cap a value is the cap and has no gradient. With both, the entries are capped first.

    Attributes:
        token: with a divergence, cap of a token's value; null for none.
        entry: with a divergence, cap of each vocabulary entry's part of the value, which is never negative; null for
            none.
    """

    token: Annotated[Cap | None, Usual(0.05, 100)] = None
    entry: Annotated[Cap | None, Usual(1e-4, 10)] = None

    @model_validator(mode="after")
    def _caps_something(self) -> Self:
        if self.token is None and self.entry is None:
            raise ValueError("expected token, entry or both, got none of them")
        return self


def clip_text(term: object) -> str:
    """Return the caps of a term, of a recipe or of a loss, as they are shown after its name."""
    clip = getattr(term, "clip", None)
    caps = {name: getattr(clip, name, None) for name in ("token", "entry")}
    shown = ", ".join(f"{name} {cap:g}" for name, cap in caps.items() if cap is not None)
    return f" (clip: {shown})" if shown else ""


class TemperaturePair(Section):
    """A softmax temperature for each model.

    Attributes:
        teacher: temperature of the teacher's logits in every divergence.
        student: temperature of the student's, whose square multiplies the divergences.
    """

    teacher: Temperature = 1.0
    student: Temperature = 1.0


def _form_of_temperature(given: object) -> str:
    """Return which form of `loss.temperature` is given, so that a fault is reported of that form alone."""
    return "(pair)" if isinstance(given, dict | TemperaturePair) else "(number)"


class PlainTerm(Section):
    """A loss term without parameters of its own.

    Attributes:
        type: divergence from the teacher, or cross-entropy with the labels.
        weight: weight of this term in the sum.
        clip: caps of a divergence, `token` and `entry`; null for none.
    """

    type: Literal[*with_parameter(""), "cross_entropy"]  # type: ignore[valid-type]
    weight: NotNegative = 1.0
    clip: Clip | None = None

    @model_validator(mode="after")
    def _clips_a_divergence(self) -> Self:
        if self.clip is not None and self.type == "cross_entropy":
            raise ValueError("clip: expected null for cross_entropy, which is no divergence; got caps")
        return self


class JSDTerm(Section):
    """The generalised Jensen-Shannon divergence; `beta` 0 is defined as forward, 1 as reverse KL.

    Attributes:
        type: divergence from the teacher, or cross-entropy with the labels.
        weight: weight of this term in the sum.
        beta: with `jsd`, weight of the teacher's distribution in the mixture that both are compared with; 0 is forward
            KL, 1 reverse KL.
        clip: caps of a divergence, `token` and `entry`; null for none.
    """

    type: Literal[*with_parameter("beta")]  # type: ignore[valid-type]
    weight: NotNegative = 1.0
    beta: Annotated[float, Field(ge=0, le=1)] = 0.5
    clip: Clip | None = None


class SkewTerm(Section):
    """Skewed KL divergence: the second argument is a mixture with weight `alpha` on the first.

    Attributes:
        type: divergence from the teacher, or cross-entropy with the labels.
        weight: weight of this term in the sum.
        alpha: with the skewed KLs, weight of the first distribution in the mixture that replaces the second: of the
            teacher's in `skew_forward_kl`, of the student's in `skew_reverse_kl`.
        clip: caps of a divergence, `token` and `entry`; null for none.
    """

    type: Literal[*with_parameter("alpha")]  # type: ignore[valid-type]
    weight: NotNegative = 1.0
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.1
    clip: Clip | None = None


class PolicyGradientTerm(Section):
    """Policy-gradient loss on the sampled token, with the log-ratio of teacher to student as its advantage.

    With A = log p_t(y) - log p_s(y) of the sampled token y, under stop-gradient, the loss is -A p_s(y) / sg(p_s(y)).
    Its gradient -A grad log p_s(y) estimates that of the reverse KL with a higher variance than the term `reverse_kl`,
    which sums over the vocabulary. The term serves comparison with other tools.

    With a reward, A = teacher_weight (log p_t(y) - log p_s(y)) + (reward - mean) / (std + 1e-4), mean and standard
    deviation over the `data.on_policy.samples` responses to the same prompt (GRPO, Shao et al., 2024).

    Attributes:
        type: `policy_gradient`.
        weight: weight of this term in the sum.
        importance: with `policy_gradient`, multiply a token's loss by the importance ratio r = p_s(y) / p(y), where p
            is the student that sampled y; false sets r to 1.
        clip: with `importance`, clipping range c of -min(r A, clip(r, 1 - c, 1 + c) A) (PPO); null for no clipping.
        discount: with `policy_gradient`, discount factor of the teacher's advantage: each token's advantage also
            includes `discount` times that of the next token of the response.
        reward: with `policy_gradient`, `FILE.py:function`, called as function(prompt, answer, row) for each response;
            it returns a finite number, or the number and a text, the feedback that a `teacher.context` may show. The
            run needs `--plugin FILE.py`. null for the teacher's advantage alone.
        reward_scale: divisor of a reward's deviation from the group's mean: `group` for the group's standard deviation
            (of a sample, n - 1) plus 1e-4, `none` for 1.
        reward_timeout: time limit of one call of the reward function, in seconds.
        teacher_weight: factor of the teacher's advantage; 0, with a reward, for the reward alone.
    """

    type: Literal["policy_gradient"]
    weight: NotNegative = 1.0
    importance: bool = False
    clip: Annotated[float, Field(gt=0, lt=1)] | None = None
    discount: Annotated[float, Field(ge=0, le=1)] = 0.0
    reward: Annotated[str, Field(pattern=FUNCTION)] | None = None
    reward_scale: Literal["group", "none"] = "group"
    reward_timeout: Annotated[float, Field(gt=0, le=86400)] = 10.0
    teacher_weight: NotNegative = 1.0

    @model_validator(mode="after")
    def _clips_a_ratio(self) -> Self:
        if self.clip is not None and not self.importance:
            raise ValueError("clip: expected importance: true beside it, since the ratio that it clips is 1 without")
        if self.teacher_weight == 0 and self.reward is None:
            raise ValueError("teacher_weight: expected a number above 0 without a reward, got 0")
        return self


class TopKTerm(Section):
    """Reverse KL over the student's current top K tokens, for comparison with other tools.

    The term `reverse_kl` covers the whole vocabulary at about the same cost.

    Attributes:
        type: `top_k_reverse_kl`.
        weight: weight of this term in the sum.
        k: with `top_k_reverse_kl`, number of the student's top tokens, at most the vocabulary.
        tail: with `top_k_reverse_kl`, treatment of the other tokens: `bucket` merges them into one outcome, so that the
            loss is at most `reverse_kl`; `renormalize` restricts both distributions to the K tokens; `sampled`
            estimates the contribution of the others from the token sampled from the student, so that the loss is
            `reverse_kl` in expectation (`data.on_policy`).
        clip: caps of a divergence, `token` and `entry`; null for none.
    """

    type: Literal["top_k_reverse_kl"]
    weight: NotNegative = 1.0
    k: Annotated[int, Field(ge=1, le=511)] = 64
    tail: Literal["bucket", "renormalize", "sampled"] = "bucket"
    clip: Clip | None = None

    @model_validator(mode="after")
    def _tells_tokens_apart(self) -> Self:
        if self.k == 1 and self.tail == "renormalize":
            raise ValueError("k: expected 2 or more with tail: renormalize, since one token alone has probability 1")
        return self


class PluginTerm(Section):
    """A loss term computed by a function of the `--plugin` file; a recipe gives the function's name as the type.

    Attributes:
        type: divergence from the teacher, or cross-entropy with the labels.
        weight: weight of this term in the sum.
        function: with `plugin`, name of the function in the file's TERMS; written as the term's `type` in recipes.
    """

    type: Literal["plugin"]
    function: Text
    weight: NotNegative = 1.0


class PluginFile(Section):
    """The plugin file that a recipe was resolved with (`distill run RECIPE --plugin FILE`), identified by its hash.

    Attributes:
        file: path of the Python file.
        sha256: SHA-256 of its content, in hexadecimal.
        modules: SHA-256 of each module that it imports from its own folder, by path relative to that.
    """

    file: Text
    sha256: Annotated[str, Field(pattern=SHA256)]
    modules: dict[str, Annotated[str, Field(pattern=SHA256)]] = Field(default_factory=dict)


class RouterCoefficients(Section):
    """Coefficients of the losses of a student's routers, where it is a mixture of experts.

    Attributes:
        balance: coefficient of the load-balancing loss, which transformers calls `router_aux_loss_coef`: E times the
            sum over the E experts of the share of tokens that choose an expert and its mean probability (Fedus et al.,
            2021). A balanced router has the number of experts per token as its value.
        z: coefficient of the router z-loss: the mean of the squared log-partition function of the router's logits (Zoph
            et al., 2022).
    """

    balance: Annotated[NotNegative, Usual(1e-5, 1e-1)] = 0.0
    z: Annotated[NotNegative, Usual(1e-6, 1e-1)] = 0.0


SCHEDULED_FIELDS = ("weight", "beta", "alpha")  # of terms


class Schedule(Section):
    """A setting of the loss as a piecewise linear function of the optimizer step.

    Attributes:
        setting: the scheduled setting: `terms.0.weight` (another index for another term; or its `beta`, `alpha`), or
            `temperature`; of two temperatures `temperature.teacher` or `temperature.student`.
        steps: optimizer steps of the points, ascending; 0 is the run's first.
        values: values at the points, interpolated linearly; constant before the first point and after the last.
    """

    setting: Text
    steps: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    values: list[NotNegative]

    @model_validator(mode="after")
    def _points(self) -> Self:
        if len(self.steps) != len(self.values):
            raise ValueError(f"expected as many values as steps, got {len(self.values)} and {len(self.steps)}")
        if sorted(set(self.steps)) != self.steps:
            raise ValueError(f"steps: expected rising numbers, got {self.steps}")
        return self

    def at(self, step: int) -> float:
        later = next((number for number, at in enumerate(self.steps) if at > step), len(self.steps))
        if later in (0, len(self.steps)):
            return self.values[later and later - 1]
        begin, end = self.steps[later - 1 : later + 1]
        share = (step - begin) / (end - begin)
        return (1 - share) * self.values[later - 1] + share * self.values[later]


def _term_and_field(setting: str) -> tuple[int, str] | None:
    """Return the term's number and the field of a scheduled `terms.NUMBER.FIELD`; None for another setting."""
    found = re.fullmatch(r"terms\.(0|[1-9][0-9]*)\.(\w+)", setting)  # one spelling a setting, which is given once
    return (int(found[1]), found[2]) if found else None


class TokenWeights(Section):
    """Factor of each trained token's loss: the product of those that are given.

    A token's position is counted from 0 in its answer: a stretch of trained tokens of one document, such as a reply of
    a chat, or a document that is trained on whole. Weights are constants, without a gradient.

    Attributes:
        gamma: factor gamma^position; 1 for none.
        window: first position and the one after the last, as in a slice of Python: `[0, 256]` for the first 256 tokens
            of each answer, `[-64, null]` for the last 64. Tokens outside have weight 0.
        function: `FILE.py:function`, called with the arrays that its parameters name, each with one entry per trained
            token of a micro-batch; it returns their weights. The run needs `--plugin FILE.py`.
        normalise: divisor of the weighted sum: `none` for the number of trained tokens of the optimizer step, `mean`
            for the sum of their weights. `mean` is refused with a function that reads outputs of the models, which are
            not known before the step.
    """

    gamma: Annotated[float, Field(gt=0, le=1)] | None = None
    window: Annotated[list[int | None], Field(min_length=2, max_length=2)] | None = None
    function: Annotated[str, Field(pattern=FUNCTION)] | None = None
    normalise: Literal["none", "mean"] = "none"

    @model_validator(mode="after")
    def _weighs_something(self) -> Self:
        if self.gamma is None and self.window is None and self.function is None:
            raise ValueError("expected gamma, window or function, got none of them")
        if self.window is not None:
            begin, end = self.window
            first = begin or 0
            if end is not None and (first < 0) == (end < 0) and end <= first:
                raise ValueError(f"window: expected the position after the last above the first, got {self.window}")
        return self

    @property
    def function_file(self) -> str:
        return (self.function or "").rpartition(":")[0]

    def __str__(self) -> str:
        parts = []
        if self.gamma is not None:
            parts.append(f"{self.gamma:g}^position")
        if self.window is not None:
            begin, end = ("" if bound is None else bound for bound in self.window)
            parts.append(f"positions [{begin}:{end}]")
        if self.function is not None:
            parts.append(self.function)
        return ", ".join(parts) + (", divided by their mean" if self.normalise == "mean" else "")


def _function_alone(value: object) -> object:
    """Return the section of `token_weights: FILE.py:function`."""
    return {"function": value} if isinstance(value, str) else value


Term = Annotated[
    PlainTerm
    | JSDTerm
    | SkewTerm
    | PolicyGradientTerm
    | TopKTerm
    | HiddenStateTerm
    | AttentionRelationTerm
    | RouterTerm
    | PluginTerm,
    Field(discriminator="type"),
]
BUILT_IN = {name for kind in get_args(get_args(Term)[0]) for name in get_args(kind.model_fields["type"].annotation)}
SEPARATE = ("policy_gradient", "top_k_reverse_kl")  # terms that are not divergences between full distributions


def _forward_kl_alone() -> list[Term]:
    return [PlainTerm(type="forward_kl", weight=1.0), PlainTerm(type="cross_entropy", weight=0.0)]


class Loss(Section):
    """The training objective: a weighted sum of terms.

    Attributes:
        temperature: softmax temperature: divides the logits of both models in every divergence; `{teacher: 1.0,
            student: 1.1}` for one of each model.
        scale_by_temperature_squared: multiply divergences by the squared temperature (Hinton et al., 2015), that of the
            student where there are two.
        label_smoothing: label smoothing of the cross-entropy term: probability mass that is spread over all tokens.
        z_loss: weight of the z-loss, the squared log-partition function, which is added to the cross-entropy term.
        router: losses of the student's own routers, where it is a mixture of experts: `config` adds what the forward of
            the model's class adds to its loss (`router_aux_loss_coef` and `router_z_loss_coef`, where its configuration
            has `output_router_logits: true`), `none` nothing; `balance` and `z` give the coefficients.
        terms: divergences and cross-entropy with their weights.
        token_weights: factor of each token's loss, by its position in the answer or by a function of a Python file;
            `FILE.py:function` is short for `{function: FILE.py:function}`. null for equal weights.
        schedule: settings that vary from step to step; `terms` records a scheduled weight at its maximum.
        plugin: Python file that defines further types of terms, set by `--plugin`; without that option none of its code
            runs.
    """

    temperature: Annotated[
        Annotated[Temperature, Tag("(number)")] | Annotated[TemperaturePair, Tag("(pair)")],
        Discriminator(_form_of_temperature),
        Usual(0.3, 10),
    ] = 1.0
    scale_by_temperature_squared: bool = True
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    z_loss: Annotated[NotNegative, Usual(1e-6, 1e-2)] = 0.0
    router: Literal["config", "none"] | RouterCoefficients = "config"
    terms: Annotated[list[Term], Field(min_length=1)] = Field(default_factory=_forward_kl_alone)
    token_weights: Annotated[
        TokenWeights | None,
        BeforeValidator(
            _function_alone,
            json_schema_input_type=TokenWeights | Annotated[str, Field(pattern=FUNCTION)] | None,
        ),
    ] = None
    schedule: list[Schedule] = Field(default_factory=list)
    plugin: PluginFile | None = None

    @model_validator(mode="before")
    @classmethod
    def _scheduled_weights_at_their_largest(cls, loss: object) -> object:
        """Set each scheduled weight in `terms` to its maximum, so that a term active in any step counts as active."""
        if not isinstance(loss, dict) or not isinstance(loss.get("schedule"), list) or not loss["schedule"]:
            return loss
        terms = loss.get("terms", [term.model_dump() for term in _forward_kl_alone()])
        for line in loss["schedule"] if isinstance(terms, list) else ():
            if not isinstance(line, dict | Schedule):
                continue  # reported when the schedule is validated
            given = line if isinstance(line, dict) else dict(line)
            number, field = _term_and_field(str(given.get("setting"))) or (0, "")
            values = given.get("values")
            if field == "weight" and number < len(terms) and values:  # else invalid
                with contextlib.suppress(TypeError, ValueError):  # reported when these fields are validated
                    largest = max(0.0, *map(float, values))
                    terms = [*terms[:number], {**dict(terms[number]), "weight": largest}, *terms[number + 1 :]]
        return {**loss, "terms": terms}

    @model_validator(mode="before")
    @classmethod
    def _other_types_are_the_plugins(cls, loss: object) -> object:
        """Rewrite `{type: mine}` as `{type: plugin, function: mine}` where a plugin is given."""
        if not isinstance(loss, dict) or not loss.get("plugin") or not isinstance(loss.get("terms"), list):
            return loss

        def named(term: object) -> object:
            if not isinstance(term, dict) or "function" in term:
                return term
            kind = term.get("type")
            own = isinstance(kind, str) and kind not in BUILT_IN
            return {**term, "type": "plugin", "function": kind} if own else term

        return {**loss, "terms": [named(term) for term in loss["terms"]]}

    @model_validator(mode="after")
    def _functions_come_from_a_file(self) -> Self:
        if self.plugin is None and any(term.type == "plugin" for term in self.terms):
            raise ValueError("terms of type plugin need distill run RECIPE --plugin FILE.py")
        return self

    @model_validator(mode="after")
    def _learns_something(self) -> Self:
        weighted = {term.type for term in self.terms if term.weight > 0}
        if not weighted:
            raise ValueError("every term has weight 0: give at least one term a weight above 0")
        if weighted <= set(LAYERED):
            raise ValueError(
                f"terms: expected a divergence or cross_entropy of weight above 0 beside {LAYERED_NAMES}, "
                "which do not train the head; got none"
            )
        for name in ("label_smoothing", "z_loss"):
            if getattr(self, name) and "cross_entropy" not in weighted:
                raise ValueError(f"{name} belongs to the cross_entropy term, and none has a weight above 0")
        if sum(getattr(term, "reward", None) is not None for term in self.terms) > 1:
            raise ValueError("terms: expected one reward at most, whose function may add up several; got more")
        return self

    @model_validator(mode="after")
    def _schedule_is_of_its_settings(self) -> Self:
        settings = [line.setting for line in self.schedule]
        for number, line in enumerate(self.schedule):
            place = self._place_of(line.setting)
            if place is None:
                raise ValueError(
                    f"schedule.{number}.setting: expected {' or '.join(self._temperature_settings)}, or weight, beta "
                    f"or alpha of a term that has it, as in terms.0.weight; got {line.setting!r}"
                )
            if settings.count(line.setting) > 1:
                raise ValueError(f"schedule: expected each setting once, got {line.setting} twice")
            section, field = place
            try:
                # between its points a line has no value beyond theirs
                for value in line.values:
                    type(section).model_validate({**section.model_dump(exclude={"schedule"}), field: value})
            except ValidationError:
                raise ValueError(f"schedule.{number}.values: {value:g} is no {field} of {line.setting}") from None
        # Weights change linearly: a sum that is 0 in any step is 0 in a step of a point too.
        for step in sorted({step for line in self.schedule for step in line.steps}):
            if not any(term.weight > 0 for term in self.at(step).terms):
                raise ValueError(f"schedule: every term has weight 0 in step {step}")
            if not any(term.weight > 0 and term.type not in LAYERED for term in self.at(step).terms):
                raise ValueError(
                    f"schedule: every term but {LAYERED_NAMES} has weight 0 in step {step}; these do not train the head"
                )
        return self

    @property
    def _temperature_settings(self) -> list[str]:
        """Temperatures as a schedule names them: the one of both models, or each of two."""
        if isinstance(self.temperature, TemperaturePair):
            return [f"temperature.{name}" for name in type(self.temperature).model_fields]
        return ["temperature"]

    def _place_of(self, setting: str) -> tuple[Section, str] | None:
        """Return the section of a scheduled setting and its field there; None where it cannot be scheduled."""
        scheduled = _term_and_field(setting)
        if scheduled is not None and scheduled[0] < len(self.terms):
            number, field = scheduled
            term = self.terms[number]
            return (term, field) if field in SCHEDULED_FIELDS and field in type(term).model_fields else None
        if setting not in self._temperature_settings:
            return None
        if isinstance(self.temperature, TemperaturePair):
            return self.temperature, setting.removeprefix("temperature.")
        return self, setting

    @property
    def temperatures(self) -> TemperaturePair:
        if isinstance(self.temperature, TemperaturePair):
            return self.temperature
        return TemperaturePair(teacher=self.temperature, student=self.temperature)

    @property
    def temperature_text(self) -> str:
        if isinstance(self.temperature, TemperaturePair):
            return f"{self.temperature.teacher:g} (teacher), {self.temperature.student:g} (student)"
        return f"{self.temperature:g}"

    @property
    def scale(self) -> float:
        """The factor of the divergences."""
        # gradients of logits that are divided by T shrink by T^2 (Hinton et al., 2015); they are the student's
        return self.temperatures.student**2 if self.scale_by_temperature_squared else 1.0

    @property
    def clips(self) -> bool:
        """Return whether an active divergence between whole distributions has caps."""
        terms = (term for term in self.terms if term.weight > 0 and term.type in DIVERGENCES)
        return any(getattr(term, "clip", None) is not None for term in terms)

    @property
    def rewarded(self) -> PolicyGradientTerm | None:
        """The active term with a reward; None where there is none."""
        found = (term for term in self.terms if isinstance(term, PolicyGradientTerm) and term.weight > 0)
        return next((term for term in found if term.reward is not None), None)

    @property
    def tailed(self) -> TopKTerm | None:
        """The active term whose tail is estimated from the sampled token; None where there is none."""
        found = (term for term in self.terms if isinstance(term, TopKTerm) and term.weight > 0)
        return next((term for term in found if term.tail == "sampled"), None)

    @property
    def tails_beside_others(self) -> bool:
        """Return whether a sampled tail has other terms beside it, or a temperature other than 1."""
        return self.tailed is not None and (self.tempered or sum(term.weight > 0 for term in self.terms) > 1)

    @property
    def tempered(self) -> bool:
        """Return whether a model's logits are divided by a temperature other than 1."""
        return (self.temperatures.teacher, self.temperatures.student) != (1.0, 1.0)

    @property
    def schedules_temperature(self) -> bool:
        """Return whether a temperature changes with the step."""
        return any(line.setting.startswith("temperature") for line in self.schedule)

    @property
    def runs_terms(self) -> bool:
        """Return whether terms come from the plugin's file, rather than token weights, a reward or an environment."""
        return self.plugin is not None and self.has("plugin")

    @property
    def weighs_by_function(self) -> bool:
        """Return whether a function of a file gives the tokens' weights."""
        return self.token_weights is not None and self.token_weights.function is not None

    @property
    def unweighted(self) -> Loss:
        """The loss with equal token weights, for what is checked or timed without the run's code."""
        return self.model_copy(update={"token_weights": None})

    @property
    def reads_layers(self) -> bool:
        """Return whether an active term compares layers of both models."""
        return self.has(*LAYERED)

    @property
    def divergences(self) -> set[str]:
        """Types of the active terms that are divergences between whole distributions."""
        return {term.type for term in self.terms if term.weight > 0 and term.type in DIVERGENCES}

    @property
    def divergence_figure(self) -> str | None:
        """Name of the reported divergence: `kl` of one direction alone, else `divergence`; None of hard labels alone.

        Terms that are no divergence between whole distributions report the forward KL, unless one stands beside them.
        """
        if self.divergences:
            return "kl" if self.divergences in ({"forward_kl"}, {"reverse_kl"}) else "divergence"
        return "kl" if any(term.weight > 0 and term.type != "cross_entropy" for term in self.terms) else None

    def has(self, *types: str) -> bool:
        """Return whether a term of one of these types has a weight above 0."""
        return any(term.type in types and term.weight > 0 for term in self.terms)

    def at(self, step: int) -> Loss:
        """Return the loss that applies after `step` optimizer steps, without a schedule."""
        if not self.schedule:
            return self
        terms = list(self.terms)
        temperature = self.temperature
        for line in self.schedule:
            value = line.at(step)
            scheduled = _term_and_field(line.setting)
            if scheduled is not None:
                number, field = scheduled
                terms[number] = terms[number].model_copy(update={field: value})
            elif isinstance(temperature, TemperaturePair):
                temperature = temperature.model_copy(update={line.setting.removeprefix("temperature."): value})
            else:
                temperature = value
        changed: dict[str, object] = {"terms": terms, "temperature": temperature, "schedule": []}
        if not any(term.type == "cross_entropy" and term.weight > 0 for term in terms):
            changed |= {"label_smoothing": 0.0, "z_loss": 0.0}  # both are parts of cross_entropy
        return self.model_copy(update=changed)

    @property
    def at_points(self) -> list[Loss]:
        """The losses at the first step and at each point of the schedule, without a schedule."""
        return [self.at(step) for step in sorted({0, *(step for line in self.schedule for step in line.steps)})]

    def with_kept_layers(self, kept: Sequence[int] | None) -> Loss:
        """Return the loss whose terms of `layers: auto` pair the layers of a student with those it was cut from.

        Args:
            kept: Layers of the teacher that the student has; None for a student that was not cut from it.
        """
        if kept is None or not self.reads_layers:
            return self
        pairs = pairs_of("auto", len(kept), max(kept) + 1, kept)

        def paired(term: LayerTerm) -> LayerTerm:
            return term.with_layers(pairs[-1:] if isinstance(term, AttentionRelationTerm) else pairs)

        return self._with_layers(lambda term: paired(term) if term.layers == "auto" else term)

    def with_automatic_layers(self) -> Loss:
        """Return the loss whose terms choose their layers themselves, for models of other numbers of layers."""
        return self._with_layers(lambda term: term.with_layers("auto"))

    def _with_layers(self, change: Callable[[LayerTerm], LayerTerm]) -> Loss:
        terms = [change(term) if isinstance(term, LayerTerm) else term for term in self.terms]
        return self.model_copy(update={"terms": terms})

    @property
    def leaves_the_teacher_out(self) -> bool:
        """Return whether a schedule has both steps with a divergence from the teacher and steps without one."""
        steps = [step for line in self.schedule for step in line.steps]
        asks = {any(t.weight > 0 and t.type != "cross_entropy" for t in self.at(step).terms) for step in steps}
        return asks == {False, True}
