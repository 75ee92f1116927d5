#!/usr/bin/env bash
# The image as its users meet it: a real Docker engine, a base made by debootstrap, the CPU image built from this clone,
# and the whole smoke job in it. No image registry is needed. Started by `./entrypoints/local test-image`, which puts
# docker-compose and rclone of the test set on PATH; wants root, Debian and about 20 GB under IMAGE_TEST_DIR.
#
#   IMAGE_TEST_DIR   where engine, base and images lie (default: a temporary folder, removed at the end)
#
# The engine is our own: own socket, own data, no bridge and no firewall rules, so nothing of the machine changes.
# The last line is "N passed, N failed". Exit codes: 1 if anything failed or the test set lacks a tool, 75 if packages could
# not be installed or the mirror did not answer, and 78 where this machine cannot run an engine: only that is no failure.
set -uo pipefail
clone=$(cd "$(dirname "$(readlink -f "$0")")/../.." && pwd)
passed=0 failed=0
export PATH=$PATH:/usr/sbin:/sbin # where Debian puts dockerd and debootstrap

say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }
cannot_run() { printf 'error: %s\n' "$*" >&2; exit 78; }
broken() { printf 'error: %s\n' "$*" >&2; exit 1; }
try_again() { printf 'error: %s\n' "$*" >&2; exit 75; }
lacking() { # those of the names that are no command; `command -v` of several is content with one
  local name
  for name; do command -v "$name" >/dev/null || printf '%s ' "$name"; done
}
check() { # description, then a command
  local what=$1
  shift
  if "$@"; then
    passed=$((passed + 1))
    say "ok    $what"
  else
    failed=$((failed + 1))
    say "WRONG $what"
  fi
}
equals() { [ "$1" = "$2" ] || { echo "        got '$1', wanted '$2'"; return 1; }; }
fails() { ! "$@"; }
contains() { grep -qF -- "$2" <<<"$1" || { echo "        '$2' is not in: $(tail -c 800 <<<"$1")"; return 1; }; }

[ "$(id -u)" = 0 ] || cannot_run "the image test starts a Docker engine, which needs root: run it as root, or the other tests alone."
[ -z "$(lacking apt-get)" ] || cannot_run "the image test makes its base with debootstrap: run it on Debian."
tools=$(lacking docker-compose rclone)
[ -z "$tools" ] || broken "not on PATH: ${tools% }; start this with ./entrypoints/local test-image."
wanted() { lacking dockerd debootstrap /usr/bin/docker; }
if [ -n "$(wanted)" ]; then
  say "installing docker.io and debootstrap"
  installed=$({ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker.io debootstrap; } 2>&1) ||
    try_again "docker.io and debootstrap could not be installed: $(tail -n 1 <<<"$installed")"
  [ -z "$(wanted)" ] || broken "docker.io and debootstrap are installed and bring no $(wanted)on PATH."
fi

work=${IMAGE_TEST_DIR:-$(mktemp -d "${TMPDIR:-/tmp}/eagle3-image.XXXXXX")}
mkdir -p "$work"
export DOCKER_HOST=unix://$work/docker.sock DOCKER_BUILDKIT=1
docker=/usr/bin/docker # another client on PATH may come without a builder

dockerd --host "$DOCKER_HOST" --data-root "$work/data" --exec-root "$work/exec" --pidfile "$work/dockerd.pid" \
  --bridge=none --iptables=false --ip6tables=false --storage-driver=overlay2 >"$work/dockerd.log" 2>&1 &
engine=$!
clean_up() {
  $docker ps -aq | xargs -r $docker rm -f >/dev/null 2>&1
  kill "$engine" 2>/dev/null
  wait "$engine" 2>/dev/null
  umount "$work"/exec/netns/* 2>/dev/null
  [ -n "${IMAGE_TEST_DIR:-}" ] || rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 75' INT TERM
for _ in $(seq 120); do $docker info >/dev/null 2>&1 && break; sleep 0.5; done
$docker info >/dev/null 2>&1 || cannot_run "the Docker engine did not start: $(tail -n 1 "$work/dockerd.log")"
say "Docker engine $($docker version --format '{{.Server.Version}}') is up"

# The base. All that this machine needs to reach its package mirrors (certificates) goes in here, so that the Dockerfile
# knows nothing of it.
base=$work/base.tar
if [ ! -s "$base" ]; then
  mirror=$(awk '/^URIs:/ { print $2; exit }' /etc/apt/sources.list.d/*.sources 2>/dev/null)
  mirror=${mirror:-$(awk '$1 == "deb" { print $2; exit }' /etc/apt/sources.list)}
  debootstrap --variant=minbase bookworm "$work/rootfs" "$mirror" >"$work/debootstrap.log" 2>&1 ||
    try_again "debootstrap failed: $(tail -n 1 "$work/debootstrap.log")"
  mkdir -p "$work/rootfs/usr/local/share/ca-certificates" "$work/rootfs/etc/ssl/certs"
  cp /usr/local/share/ca-certificates/*.crt "$work/rootfs/usr/local/share/ca-certificates/" 2>/dev/null
  cp /etc/ssl/certs/ca-certificates.crt "$work/rootfs/etc/ssl/certs/" 2>/dev/null
  rm -rf "$work"/rootfs/var/cache/apt/archives/*.deb "$work"/rootfs/usr/share/{doc,man,locale}/*
  tar -C "$work/rootfs" -cf "$base.tmp" . && mv "$base.tmp" "$base"
  rm -rf "$work/rootfs"
fi
ca=/etc/ssl/certs/ca-certificates.crt
$docker import -c "ENV PIP_CERT=$ca SSL_CERT_FILE=$ca REQUESTS_CA_BUNDLE=$ca" "$base" eagle3-test-base:bookworm >/dev/null
say "base image is ready"

# --- build ------------------------------------------------------------------------------------------------------------
rm -rf "$work/context"
cp -r "$clone" "$work/context"
# What may lie in a clone and must not get into a layer: the file of secrets, and a run.
mkdir -p "$work/context/runs/hero"
echo HF_TOKEN=hf_planted | tee "$work/context/eagle3-job.env" >"$work/context/runs/hero/log.txt"
chmod -R go-rwx "$work/context" # as cloned under a strict umask; the image is for any user
build() { # target, tag, base, then more arguments; output goes to $work/build-TAG.log
  local target=$1 tag=$2 from=$3
  shift 3
  $docker build --progress plain --network host --target "$target" --build-arg "BASE_IMAGE=$from" \
    --build-arg REVISION=0123abc -t "eagle3-job:$tag" "$@" "$work/context" >"$work/build-$tag.log" 2>&1
}
start=$SECONDS
check "the CPU image builds from a bare Debian" build cpu cpu eagle3-test-base:bookworm
say "      cold build: $((SECONDS - start)) s, $(($($docker image inspect -f '{{.Size}}' eagle3-job:cpu) / 1000000)) MB"
[ "$failed" = 0 ] || { tail -n 30 "$work/build-cpu.log"; echo "$passed passed, $failed failed"; exit 1; }
echo "# a change" >>"$work/context/jobs/errors.py"
start=$SECONDS
check "a change of the source builds again" build cpu changed eagle3-test-base:bookworm
check "and leaves the dependency layer alone, in under 60 s ($((SECONDS - start)) s)" test $((SECONDS - start)) -lt 60
check "the S3 image for rehearsals builds" build s3 s3 eagle3-test-base:bookworm

# Stand-ins for the vLLM image, which no registry gives us here: our CPU image without our user and one package, first
# without a CUDA toolkit, then with something executable in the place of its ptxas.
base_with_vllm() { # tag, base, command
  printf '%s\n' "FROM $2" 'USER 0' "RUN $3" | $docker build --network host -q -t "eagle3-test-base:$1" - >/dev/null
}
base_with_vllm vllm eagle3-job:cpu "userdel eagle3 && python3 -m ensurepip >/dev/null && rm -r /opt/venv/lib/python3*/site-packages/xxhash*"
base_with_vllm ptxas eagle3-test-base:vllm "mkdir -p /usr/local/cuda/bin && cp /bin/true /usr/local/cuda/bin/ptxas"
check "on a base without a CUDA toolkit the gpu target does not build" fails build gpu none eagle3-test-base:vllm
check "and says why" contains "$(cat "$work/build-none.log")" "this base has no /usr/local/cuda/bin/ptxas"
check "on a base with vLLM 0.16.0 and ptxas it builds" build gpu gpu eagle3-test-base:ptxas
check "adds only what the base lacks" contains "$(cat "$work/build-gpu.log")" "the base lacks 1 packages"
check "and the job starts there" $docker run --rm --network none eagle3-job:gpu --version

# --- what the image is ------------------------------------------------------------------------------------------------
label() { $docker image inspect -f "{{index .Config.Labels \"$1\"}}" eagle3-job:cpu; }
check "labels carry the revision" equals "$(label org.opencontainers.image.revision)" 0123abc
check "labels carry vLLM's version" equals "$(label eagle3-job.vllm)" 0.16.0
check "the user is not root" equals "$($docker run --rm --network none --entrypoint id eagle3-job:cpu -u)" 10001
planted=$($docker run --rm --network none --entrypoint grep eagle3-job:cpu -rlsF hf_planted /opt/eagle3-job; echo "rc=$?")
check "no secret and no run that lies in the clone is in it" equals "$planted" "rc=1"
check "a wrong command line exits with 2" equals "$($docker run --rm --network none eagle3-job:cpu no-such-job >/dev/null 2>&1; echo $?)" 2
check "it runs on a read-only root" $docker run --rm --network none --read-only --tmpfs /tmp eagle3-job:cpu --version
mkdir -p "$work/root-owned"
refusal=$($docker run --rm --network none -v "$work/root-owned:/data" eagle3-job:cpu smoke 2>&1; echo "rc=$?")
check "a folder of root's mounted as /data is refused with 78" contains "$refusal" "rc=78"
check "in one sentence that names user and folder" contains "$refusal" "user 10001 cannot write /data/home"
refusal=$($docker run --rm --network none -v "$work/root-owned:/data:ro" eagle3-job:cpu smoke 2>&1; echo "rc=$?")
check "a folder that is mounted read-only is told from one of another user" contains "$refusal" "is mounted read-only): mount it without :ro"
unhealthy=$($docker run --rm --network none --entrypoint /opt/eagle3-job/entrypoints/healthy eagle3-job:cpu; echo "rc=$?")
check "where nothing was written it is not healthy" contains "$unhealthy" "rc=1"

# --- the job: any user id, no network but the S3 server, stopped in mid-run, continued by compose ---------------------------
# The compose file's own S3 server; the override takes away what this engine lacks, a bridge.
printf 'services: {s3: {image: "eagle3-job:s3", network_mode: none}}\n' >"$work/s3.yml"
compose_s3() { docker-compose -f "$work/context/docker-compose.yml" -f "$work/s3.yml" "$@"; }
check "compose starts its S3 server" compose_s3 up --no-build -d s3
s3=$(compose_s3 ps -q s3)
$docker volume rm -f eagle3-test-data >/dev/null # of an earlier test in a kept IMAGE_TEST_DIR
$docker volume create eagle3-test-data >/dev/null
push=(--set push.uri=s3://heads/smoke --set push.endpoint_url=http://127.0.0.1:9000 --set push.path_style=true)
keys=(AWS_ACCESS_KEY_ID=rehearsal AWS_SECRET_ACCESS_KEY=rehearsal-only)
job=$($docker run -d --user 12345:0 --network "container:$s3" -v eagle3-test-data:/data "${keys[@]/#/--env=}" eagle3-job:cpu smoke "${push[@]}" --json)
running() { [ "$($docker inspect -f '{{.State.Running}}' "$job")" = true ]; }
answered() { $docker exec "$job" sh -c 'cat /data/runs/smoke/states/train/responses.jsonl 2>/dev/null' | wc -l; }
for _ in $(seq 600); do
  [ "$(answered)" -ge 20 ] && break
  running || break
  sleep 1
done
check "the job answers train prompts as user 12345" running
check "and is healthy meanwhile" $docker exec "$job" /opt/eagle3-job/entrypoints/healthy
before=$(answered)
start=$SECONDS
$docker stop -t 60 "$job" >/dev/null
check "SIGTERM ends it within 30 s ($((SECONDS - start)) s)" test $((SECONDS - start)) -lt 30
check "with exit code 75" equals "$($docker inspect -f '{{.State.ExitCode}}' "$job")" 75
outside=$($docker diff "$job" | awk '$2 !~ /^\/tmp(\/|$)/')
check "and nothing was written outside the volume and /tmp" equals "$outside" ""
check "and the JSON line says so" contains "$($docker logs "$job" 2>/dev/null | tail -n 1)" '"status": "interrupted"'

# The same volume through compose, in the S3 server's network.
cat >"$work/override.yml" <<YAML
services:
  smoke:
    image: eagle3-job:cpu
    user: "12345:0"
    network_mode: "container:$s3"
    command: ["smoke", "--json"]
    environment: {AWS_ACCESS_KEY_ID: rehearsal, AWS_SECRET_ACCESS_KEY: rehearsal-only}
volumes:
  data: {name: eagle3-test-data, external: true}
YAML
compose() { docker-compose -f "$work/context/docker-compose.yml" -f "$work/override.yml" "$@"; }
compose up --no-build --no-color --no-log-prefix --exit-code-from smoke smoke >"$work/continued.log" 2>"$work/compose.log"
code=$?
check "the same command through compose continues it and exits with 0" equals "$code" 0
[ "$code" = 0 ] || tail -n 20 "$work/compose.log" # what the job said on standard error
verdict=$(grep '^{"status"' "$work/continued.log" | tail -n 1)
check "it is done" contains "$verdict" '"status": "done"'
check "it is published to the S3 server" contains "$verdict" '"published": "s3://heads/smoke"'
finished=$($docker run --rm --network none -v eagle3-test-data:/data --entrypoint cat eagle3-job:cpu /data/runs/smoke/states/train/responses.jsonl)
check "answers from before the stop are kept, each once" \
  python3 -c 'import json, sys; ids = [json.loads(l)["id"] for l in sys.stdin]; sys.exit(not (len(ids) == len(set(ids)) >= int(sys.argv[1]) > 0))' "$before" <<<"$finished"
check "the manifest lies in the bucket" $docker exec "$s3" test -s /data/heads/smoke/manifest.json
pulled=$($docker run --rm --user 12345:0 --network "container:$s3" -v eagle3-test-data:/data "${keys[@]/#/--env=}" eagle3-job:cpu pull s3://heads/smoke /data/pulled "${push[@]:2}" 2>&1; echo "rc=$?")
check "and comes back verified" contains "$pulled" "rc=0"

sed -i 's/command: .*/command: ["smoke", "--set", "train.no_such_key=1"]/' "$work/override.yml"
compose up --no-build --no-color --exit-code-from smoke smoke >"$work/refused.log" 2>&1
check "compose passes exit code 78 on" equals "$?" 78

say "finished"
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
