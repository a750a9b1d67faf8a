# Two commands are all a reader needs; each sets up what it needs on a fresh machine.
#
#   make scan     scan this machine, then a recorded node with a miner on it
#   make test     run all tests (ARGS="-k slurm" for some)

.PHONY: scan test test-guest test-corpus test-libcuda test-image manifests baselines classifier fuzz probes check schema lock bench clean
.NOTPARALLEL:

scan:
	@scripts/setup run
	@scripts/scan

test:
	@scripts/setup test
	@scripts/test $(ARGS)

# The eBPF probes for this machine: without them `gpuwarden watch` polls /proc.
probes:
	@scripts/build_probes

# Every way of seeing opens in a kernel of its own under emulation: minutes, so not part of `test`.
test-guest:
	@scripts/setup test
	@scripts/guest $(ARGS)

# GPU modules of public libraries, byte for byte with cuobjdump, and features against the training
# set: gigabytes of wheels and half an hour, so not part of `test`.
test-corpus:
	@scripts/setup test
	@.venv/bin/python -m pytest -q tests/corpus $(ARGS); status=$$?; \
		cat build/corpus/report.txt; exit $$status

# The finder and the probes on NVIDIA's real driver library, which loads without a GPU: it comes from
# the non-free component of the machine's Debian mirror, so not part of `test`.
test-libcuda:
	@scripts/setup test
	@.venv/bin/python -m pytest -q tests/libcuda $(ARGS)

# The container image, built and run as the DaemonSet runs it: minutes at first, so not part of `test`.
test-image:
	@scripts/setup test
	@.venv/bin/python -m pytest -q tests/image $(ARGS)

# deploy/kubernetes, and the chart's copies of alerts and dashboard.
manifests:
	@scripts/setup test
	@.venv/bin/python scripts/render_manifests

# The starter baseline that ships, of the wheels in scripts/baseline_packages.txt: 22 GB of downloads,
# twenty minutes on two idle cores.
baselines:
	@scripts/setup run
	@.venv/bin/python scripts/build_baselines $(ARGS)

# The classifier of GPU code: trained and measured anew, every figure left-out.
classifier:
	@scripts/setup test
	@.venv/bin/python bench/train_classifier.py --train $(ARGS)

# A million mutants of GPU modules of every form.
fuzz:
	@scripts/setup test
	@.venv/bin/python bench/fuzz_code.py $(ARGS)

# Format, lint, types, floors and sizes, before each commit.
check:
	@scripts/setup test
	@scripts/check

# The JSON Schema of the report, from its types.
schema:
	@scripts/setup run
	@.venv/bin/python -c "from gpuwarden.outputs.json_output import schema; print(schema(), end='')" \
		>docs/report.schema.json

# New locks from pyproject.toml; ARGS=--upgrade takes newer releases.
lock:
	@scripts/lock $(ARGS)

bench:
	@scripts/setup test
	@.venv/bin/python bench/scan_speed.py $(ARGS)
	@.venv/bin/python bench/probe_speed.py
	@.venv/bin/python bench/watch_speed.py
	@.venv/bin/python bench/code_memory.py
	@.venv/bin/python bench/baseline_speed.py
	@.venv/bin/python bench/cuda_capture.py --nice -10
	@.venv/bin/python bench/cuda_modules.py
	@.venv/bin/python -m bench.cuda_finder
	@.venv/bin/python bench/launch_profiles.py
	@.venv/bin/python bench/cuda_launch_cost.py
	@.venv/bin/python bench/evidence_speed.py
	@.venv/bin/python bench/code_speed.py

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
