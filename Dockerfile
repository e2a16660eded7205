# The image of base-rl: the proxy, the commands and the scripted engine, without PyTorch.
# `--build-arg EXTRAS=embedded,train` adds the embedded engine and the trainer. See "Containers" in docs/operating.md.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG EXTRAS=""
# The index that PyTorch is taken from, besides PyPI: the default has builds for the CPU, which are gigabytes smaller.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN python3 -m venv /opt/base-rl
COPY constraints.txt ./
# PyTorch in a layer of its own: a change of the code does not install it again.
RUN if [ -n "$EXTRAS" ]; then \
      /opt/base-rl/bin/pip install --no-cache-dir -c constraints.txt --extra-index-url "$TORCH_INDEX" torch; \
    fi
COPY . .
RUN /opt/base-rl/bin/pip install --no-cache-dir -c constraints.txt ".${EXTRAS:+[$EXTRAS]}"

FROM ${BASE}
COPY --from=build /opt/base-rl /opt/base-rl
COPY agents_examples/calculator/checkpoint /opt/models/calculator
# A named volume takes the owner of the folder that it covers, so both folders must exist and belong to the user.
RUN useradd --uid 1000 --create-home base-rl && mkdir /data /models && chown base-rl /data /models
ENV PATH=/opt/base-rl/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/models \
    BASE_RL_SERVER__DATA_DIR=/data \
    BASE_RL_SERVER__HOST=0.0.0.0
USER base-rl
WORKDIR /data
EXPOSE 8080
CMD ["python", "-m", "proxy"]
