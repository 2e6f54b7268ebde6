"""Single-line faults and, for each, the test that must fail: one named after what is wrong."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault: a text of one line of a file that is replaced, and the test that must see it.

    Attributes:
        what: What is wrong.
        path: File, from `distill_kernels` or `distill` on.
        right: Text of the line, once in the file.
        wrong: What takes its place.
        test: Id of the test, or the name of an example of `tests/ops/test_ops.py`, which the doctor checks too.
    """

    what: str
    path: str
    right: str
    wrong: str
    test: str

    @property
    def example(self) -> str | None:
        """Return the name of the example, if it is one, which is the name of the doctor's check."""
        return None if "::" in self.test else self.test

    @property
    def test_id(self) -> str:
        """Return the id of the test."""
        return f"tests/ops/test_ops.py::test_op_equals_its_reference[{self.test}]" if self.example else self.test


ROWS = "distill_kernels/losses/row_functions.py"
FLASH = "distill_kernels/attention/flash.py"
RANGES = "distill_kernels/attention/ranges.py"
RMS = "distill_kernels/layers/rms_norm_kernels.py"
ADAMW = "distill_kernels/optim/adamw_kernels.py"
QUANTISE = "distill_kernels/quantisation/fake_quantise.py"
FAULTS = [
    Fault(
        "gradient of reverse KL times 1.01",
        ROWS,
        "        f = g - p_s + p_t",
        "        f = g - p_s + p_t; g *= 1.01",
        "fused_distillation_loss: reverse_kl",
    ),
    Fault(
        "gradient of forward KL without 1 % of the teacher",
        ROWS,
        "        f = _log_ratio_product(p_t, log_t, log_s) + g",
        "        f = _log_ratio_product(p_t, log_t, log_s) + g; g = p_s - 0.99 * p_t",
        "fused_distillation_loss: forward_kl",
    ),
    Fault(
        "total variation not halved",
        ROWS,
        "f = 0.5 * tl.abs(difference)",
        "f = tl.abs(difference)",
        "distillation_loss: tvd",
    ),
    Fault(
        "JSD's gradient with another beta",
        ROWS,
        "g = (parameter - 1.0) * p_s * log_q",
        "g = (parameter - 0.9) * p_s * log_q",
        "fused_distillation_loss: jsd",
    ),
    Fault(
        "skewed forward KL's gradient without 1 - alpha",
        ROWS,
        "g = (1.0 - parameter) * p_s * (1.0 - e * reciprocal(q))",
        "g = p_s * (1.0 - e * reciprocal(q))",
        "fused_distillation_loss: skew_forward_kl",
    ),
    Fault(
        "skewed reverse KL's gradient without alpha",
        ROWS,
        "g = p_s * (parameter * (1.0 - reciprocal(q)) - log_q)",
        "g = p_s * ((1.0 - reciprocal(q)) - log_q)",
        "fused_distillation_loss: skew_reverse_kl",
    ),
    Fault(
        "soft cap's derivative without the square",
        ROWS,
        "g *= 1.0 - (z * inverse_cap) * (z * inverse_cap)",
        "g *= 1.0 - (z * inverse_cap)",
        "fused_kl_loss: soft caps and scales",
    ),
    Fault(
        "gradient without the student's logit scale",
        ROWS,
        "        g *= student_scale",
        "        g *= 1.0",
        "fused_kl_loss: soft caps and scales",
    ),
    Fault(
        "smoothing added to the gradient",
        ROWS,
        "p -= smoothing / vocab",
        "p += smoothing / vocab",
        "cross_entropy: smoothing and z-loss",
    ),
    Fault(
        "z-loss's gradient halved",
        ROWS,
        "p *= 1.0 + 2.0 * z_loss * lse",
        "p *= 1.0 + z_loss * lse",
        "cross_entropy: smoothing and z-loss",
    ),
    Fault(
        "z-loss subtracted",
        ROWS,
        "loss += z_loss * row_lse * lse",
        "loss -= z_loss * row_lse * lse",
        "cross_entropy: smoothing and z-loss",
    ),
    Fault(
        "top-k gradient without 1 / T",
        "distill_kernels/losses/topk_kernel.py",
        "slope = (g_top - p_s * tl.sum(g_top, 0)) * inverse_t",
        "slope = g_top - p_s * tl.sum(g_top, 0)",
        "fused_top_k_kl_loss: bucket",
    ),
    Fault(
        "sampled tail's other tokens without their weight",
        "distill_kernels/losses/topk_kernel.py",
        "others = weights[0] * inverse_t * total",
        "others = weights[0] * inverse_t",
        "fused_top_k_kl_loss: sampled",
    ),
    Fault(
        "k3 without its 1",
        "distill_kernels/losses/policy_kernel.py",
        "growth = tl.exp(difference) - 1.0",
        "growth = tl.exp(difference)",
        "fused_policy_gradient_loss: KL by k3",
    ),
    Fault(
        "ratio of probabilities upside down",
        "distill_kernels/losses/policy_kernel.py",
        "ratio = tl.exp(log_p - tl.load(old_ptr + row).to(tl.float32))",
        "ratio = tl.exp(tl.load(old_ptr + row).to(tl.float32) - log_p)",
        "fused_policy_gradient_loss: KL by k2",
    ),
    Fault(
        "attention sees one key too many in its last block",
        FLASH,
        "(column[None, :] < high[:, None])",
        "(column[None, :] <= high[:, None])",
        "flash_attention: causal",
    ),
    Fault(
        "sink left out of the denominator",
        FLASH,
        "l_i = l_i + total",
        "l_i = l_i + 0.0 * total",
        "flash_attention: causal, sinks",
    ),
    Fault(
        "attention's scale off by 1 %",
        FLASH,
        "p = tl.exp2(s * score_scale - m_new[:, None])",
        "p = tl.exp2(s * score_scale * 1.01 - m_new[:, None])",
        "flash_attention: scale",
    ),
    Fault(
        "sliding window one key too wide",
        RANGES,
        "low = tl.maximum(first, diagonal - window + 1)",
        "low = tl.maximum(first, diagonal - window)",
        "flash_attention: window",
    ),
    Fault(
        "tanh of the soft cap at another rate",
        "distill_kernels/attention/operands.py",
        "tl.exp2(scores * rate * (2 * LOG2_E))",
        "tl.exp2(scores * rate * 2.7)",
        "flash_attention: soft cap",
    ),
    Fault(
        "documents read from one position on",
        RANGES,
        "low = tl.where(outside, nothing, low)",
        "low = tl.where(outside, nothing, low + 1)",
        "flash_attention: causal, packed documents",
    ),
    Fault(
        "a new token sees a slot that is not filled",
        "distill_kernels/decoding/cached_attention.py",
        "high = length - new + 1 + token",
        "high = length - new + token",
        "decode_attention: one token",
    ),
    Fault("RMSNorm with twice its epsilon", RMS, "/ H + eps)", "/ H + 2 * eps)", "rms_norm: another epsilon"),
    Fault(
        "RMSNorm's gradient with 0.9 of the mean",
        RMS,
        "dx = (dnormed - normed * mean_dn_n) * rstd",
        "dx = (dnormed - normed * mean_dn_n * 0.9) * rstd",
        "rms_norm",
    ),
    Fault(
        "Gemma's gradient without its 1",
        RMS,
        "return dy * (1.0 + weight.to(tl.float32))[None, :]",
        "return dy * (weight.to(tl.float32))[None, :]",
        "rms_norm: gemma",
    ),
    Fault(
        "residual's gradient left out",
        RMS,
        "dx += tl.load(dsum_at, mask=mask, other=0.0).to(tl.float32)",
        "dx += 0 * tl.load(dsum_at, mask=mask, other=0.0).to(tl.float32)",
        "add_rms_norm",
    ),
    Fault(
        "LayerNorm's gradient without the mean",
        "distill_kernels/layers/layer_norm_kernels.py",
        "dx = dnormed * rstd - total * rstd / H - normed * (sum_dn_n * rstd / H)",
        "dx = dnormed * rstd - normed * (sum_dn_n * rstd / H)",
        "layer_norm",
    ),
    Fault(
        "rotation's sign",
        "distill_kernels/layers/rope.py",
        "(x2 * cos2 + x1 * sin2)",
        "(x2 * cos2 - x1 * sin2)",
        "rope: whole heads",
    ),
    Fault(
        "derivative of SiLU",
        "distill_kernels/layers/activations.py",
        "return x * s, s * (1.0 + x * (1.0 - s))",
        "return x * s, s * (1.0 + x * s)",
        "swiglu",
    ),
    Fault(
        "derivative of the tanh form of GELU",
        "distill_kernels/layers/activations.py",
        "slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)",
        "slope = 1.5957691216057308 * (1.0 + 0.044715 * x * x)",
        "geglu: tanh",
    ),
    Fault(
        "AdamW without its first bias correction",
        ADAMW,
        "step_size = lr / correction1",
        "step_size = lr",
        "FusedAdamW: three steps",
    ),
    Fault(
        "AdamW's weight decay without the learning rate",
        ADAMW,
        "decay = 1.0 - lr * weight_decay",
        "decay = 1.0 - weight_decay",
        "FusedAdamW: three steps",
    ),
    Fault(
        "AdamW's second moment of the gradient itself",
        ADAMW,
        "rest2 * gradient * gradient",
        "rest2 * gradient",
        "FusedAdamW: three steps",
    ),
    Fault(
        "fake quantiser rounds up from 0.4",
        QUANTISE,
        "tl.abs(x) - whole >= 0.5",
        "tl.abs(x) - whole >= 0.4",
        "fake_quantise_into: q8_0",
    ),
    Fault(
        "clamped weights keep their gradient",
        QUANTISE,
        "tl.store(dw_ptr + at, tl.where(inside, dy, 0.0)",
        "tl.store(dw_ptr + at, tl.where(inside, dy, dy)",
        "learned_gradients: q4_0",
    ),
    Fault(
        "gradient of a scale without its codes",
        QUANTISE,
        "dscale = tl.sum(dy * (codes - tl.where(inside, x, 0.0)), 1)",
        "dscale = tl.sum(dy * (codes - x), 1)",
        "learned_gradients: q5_0",
    ),
    Fault(
        "sign of a minimum's gradient",
        QUANTISE,
        "-tl.sum(tl.where(inside, 0.0, dy), 1)",
        "tl.sum(tl.where(inside, 0.0, dy), 1)",
        "learned_gradients: q4_k",
    ),
    Fault(
        "squared distance's gradient halved",
        "distill_kernels/layers/state_distance.py",
        "(u * (2.0 / WIDTH))",
        "(u * (1.0 / WIDTH))",
        "state_distance: mse",
    ),
    Fault(
        "cosine's gradient without a norm",
        "distill_kernels/layers/state_distance.py",
        "s * (cosine / norm_s)[:, None]",
        "s * cosine[:, None]",
        "state_distance: cosine",
    ),
    Fault(
        "a relation's own score counts once",
        "distill_kernels/layers/attention_relation.py",
        "w = tl.where(i[:, None] == j[None, :], 2 * w, w)",
        "w = tl.where(i[:, None] == j[None, :], w, w)",
        "relation_divergence",
    ),
    Fault(
        "relations across documents",
        "distill_kernels/layers/attention_relation.py",
        "        sees &= of_i[:, None] == ",
        "        sees |= of_i[:, None] == ",
        "relation_divergence: packed documents",
    ),
    Fault(
        "softmax's gradient without the row's sum",
        "distill_kernels/extras/row_softmax.py",
        "dx = y * (dy - tl.sum(y * dy, 1, keep_dims=True))",
        "dx = y * dy",
        "softmax",
    ),
    Fault(
        "experts' gradient without the router's weight",
        "distill_kernels/layers/experts.py",
        "        da *= weight[:, None]",
        "        da *= 1.0",
        "experts: silu",
    ),
    Fault(
        "experts' biases left out of the backward",
        "distill_kernels/layers/experts.py",
        "            up += up_bias\n        offset = ",
        "            up += 0 * up_bias\n        offset = ",
        "experts: clamped silu, biases, interleaved",
    ),
    Fault(
        "gradient through a capped entry",
        ROWS,
        "g_i = tl.where(beyond, 0.0, g_i)",
        "g_i = tl.where(beyond, g_i, g_i)",
        "tests/losses/test_clip.py::test_each_term_has_caps_of_its_own[kernel-mean]",
    ),
    Fault(
        "gradient of a token beyond its cap stays",
        "distill_kernels/losses/row_kernel.py",
        "zero_row(gradient_ptr, V, blocks, tl.arange(0, TILE)[None, :], BLOCK)",
        "tl.debug_barrier()",
        "tests/losses/test_clip.py::test_a_token_beyond_its_cap_has_no_gradient[forward_kl]",
    ),
    # what kernels and references share, against the definition
    Fault(
        "divergences without T squared",
        "distill_kernels/losses/terms.py",
        "factor = student_temperature**2 if scale_by_temperature_squared else 1.0",
        "factor = 1.0",
        "tests/ops/test_ops.py::test_divergences_are_multiplied_by_the_temperature_squared",
    ),
    # the training around the kernels
    Fault(
        "first token of a packed document is trained on",
        "distill/core/labels.py",
        "labels.masked_fill(position_ids == 0, IGNORE_INDEX)",
        "labels.masked_fill(position_ids < 0, IGNORE_INDEX)",
        "tests/losses/test_objective.py::test_a_document_does_not_predict_the_next_ones_first_token",
    ),
    Fault(
        "labels are not shifted",
        "distill/core/labels.py",
        "shifted[..., :-1] = labels[..., 1:]",
        "shifted[..., :-1] = labels[..., :-1]",
        "tests/data/test_packing.py::test_labels_shift_by_one_to_the_left",
    ),
    Fault(
        "a step's divisor is that of one micro-batch",
        "distill/training/trainer.py",
        "self.objective.student_inputs(inputs, num_items_in_batch, weight_sum",
        "self.objective.student_inputs(inputs, None, weight_sum",
        "tests/runs/test_trainer.py::test_one_batch_of_eight_equals_eight_of_one[forward_kl]",
    ),
    Fault(
        "a resumed run draws anew",
        "distill/training/trainer.py",
        "    # ------------------------------------------------------------------ loss\n",
        "    def _load_rng_state(self, checkpoint): pass\n",
        "tests/runs/test_trainer.py::test_resume_in_the_middle_of_an_epoch_is_exact[False]",
    ),
]
