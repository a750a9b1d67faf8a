# Two commands are all a reader needs; each sets up what it needs on a fresh machine.
#
#   make scan     scan this machine, then a recorded node with a miner on it
#   make test     run all tests (ARGS="-k slurm" for some)

.PHONY: scan test check schema lock bench clean
.NOTPARALLEL:

scan:
	@scripts/setup run
	@scripts/scan

test:
	@scripts/setup test
	@.venv/bin/python -m pytest -q $(ARGS)

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

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
