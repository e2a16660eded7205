# The images of base-rl, as targets:
#   proxy  the proxy, the worker and the commands, without PyTorch
#   torch  the same with the embedded engine and the trainer
# See "Containers" in docs/operating.md. Any image with Python 3.11 or newer and its venv module can be the BASE.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS tools
WORKDIR /src
RUN python3 -m venv /opt/base-rl
COPY deploy/requirements.py pyproject.toml constraints.txt ./
# Dependencies in layers of their own: a change of the code does not install them again.
RUN python3 requirements.py pyproject.toml celery > proxy.txt && \
    /opt/base-rl/bin/pip install --no-cache-dir -c constraints.txt -r proxy.txt "setuptools>=80"

FROM tools AS build-proxy
COPY . .
RUN /opt/base-rl/bin/pip install --no-cache-dir --no-deps --no-build-isolation . && \
    /opt/base-rl/bin/pip uninstall --yes setuptools pip

FROM tools AS build-torch
# The index that PyTorch is taken from, besides PyPI: the default has builds for the CPU, which are gigabytes smaller.
# Empty: PyPI alone, whose build is for CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python3 requirements.py pyproject.toml embedded train > torch.txt && \
    /opt/base-rl/bin/pip install --no-cache-dir -c constraints.txt -r torch.txt \
      ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
COPY . .
# setuptools remains: PyTorch needs it.
RUN /opt/base-rl/bin/pip install --no-cache-dir --no-deps --no-build-isolation . && \
    /opt/base-rl/bin/pip uninstall --yes pip

FROM ${BASE} AS base
COPY agents_examples/calculator/checkpoint /opt/models/calculator
# A named volume takes the owner of the folder that it covers, so both folders must exist and belong to the user.
RUN groupadd --gid 1000 base-rl && \
    useradd --uid 1000 --gid 1000 --home-dir /tmp --no-create-home base-rl && \
    mkdir /data /models && \
    chown base-rl:base-rl /data /models
# The root is read-only, so the home is /tmp, and no Python file is compiled anew.
ENV PATH=/opt/base-rl/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/models \
    BASE_RL_SERVER__DATA_DIR=/data \
    BASE_RL_SERVER__HOST=0.0.0.0
USER 1000:1000
WORKDIR /data
CMD ["python", "-m", "proxy"]

FROM base AS torch
COPY --from=build-torch /opt/base-rl /opt/base-rl

# Last, so that it is what a build without a target makes.
FROM base AS proxy
COPY --from=build-proxy /opt/base-rl /opt/base-rl
EXPOSE 8080
