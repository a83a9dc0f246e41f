"""What vllm-gac relies on in vLLM, compared with the sources of a release, which need not run.

mypy checks what our sources import, call, override and read; `behaviours.yaml` lists what the
sources of a release must say beside that. `python -m tools.vllm_contract DIRECTORY` prints a line
for each thing that a release does not have.
"""
