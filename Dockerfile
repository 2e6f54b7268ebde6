# Images with the command `distill`, without and with CUDA, and one to work on the code.
#
#   docker build --target cpu -t distill:cpu .
#   docker build --target cuda -t distill:cuda .
#   docker run --rm --gpus all -v "$PWD:/work" -v distill-cache:/cache distill:cuda run my-chat.yaml --name first
#
# torch's wheels on PyPI bring the CUDA libraries: the host needs NVIDIA's driver and its container toolkit.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS base
# Triton compiles the launchers of its kernels with a C compiler
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev git \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 distill \
    && mkdir /work /cache /opt/venv /opt/distill \
    && chown distill:distill /work /cache /opt/venv /opt/distill
USER distill
ENV PATH=/opt/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    DISTILL_CACHE=/cache/distill \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton
RUN python -m venv /opt/venv
WORKDIR /opt/distill
COPY constraints.txt ./

FROM base AS torch-cpu
RUN pip install -c constraints.txt --index-url https://download.pytorch.org/whl/cpu torch

FROM base AS torch-cuda
RUN pip install -c constraints.txt torch

# the repository is mounted by .devcontainer/devcontainer.json, which installs it
FROM torch-cpu AS dev
WORKDIR /work

FROM torch-cuda AS cuda
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY recipes recipes
COPY distill distill
RUN pip install -c constraints.txt ".[serve,plots]"
WORKDIR /work
ENTRYPOINT ["distill"]
CMD ["--help"]

FROM torch-cpu AS cpu
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY recipes recipes
COPY distill distill
RUN pip install -c constraints.txt ".[serve,plots]"
WORKDIR /work
ENTRYPOINT ["distill"]
CMD ["--help"]
