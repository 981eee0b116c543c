# Keel for a user without rights. GPUs: --build-arg TORCH=cu130, and docker run --gpus all.
FROM python:3.13-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE LICENSE-math-font ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:3.13-slim-bookworm
ARG TORCH=cpu
ARG EXTRAS=data,lora,math,view
# The compiler makes the kernels for the processor that runs them.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/
COPY --from=wheel /dist /tmp/dist
RUN pip install --no-cache-dir -c /tmp/constraints.txt \
        --extra-index-url "https://download.pytorch.org/whl/${TORCH}" \
        "torch==$(sed -n 's/^torch==//p' /tmp/constraints.txt)+${TORCH}" \
        "$(echo /tmp/dist/*.whl)[${EXTRAS}]" \
    && rm -r /tmp/dist /tmp/constraints.txt
RUN useradd --create-home --uid 1000 keel && install -d -o keel /work
USER keel
WORKDIR /work
EXPOSE 8765
ENTRYPOINT ["keel"]
CMD ["--help"]
