# Two commands are all a reader needs; each sets up what it needs on a fresh machine.
#
#   make scan     scan this machine, then a recorded node with a miner on it
#   make test     run all tests (ARGS="-k slurm" for some)

.PHONY: scan test test-guest probes check schema lock bench clean
.NOTPARALLEL:

scan:
	@scripts/setup run
	@scripts/scan

test:
	@scripts/setup test
	@.venv/bin/python -m pytest -q $(ARGS)

# The eBPF probes for this machine: without them `gpuwarden watch` polls /proc.
probes:
	@scripts/build_probes

# Every way of seeing opens in a kernel of its own under emulation: minutes, so not part of `test`.
test-guest:
	@scripts/setup test
	@scripts/guest $(ARGS)

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

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
