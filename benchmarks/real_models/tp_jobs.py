"""Prints the job of a lease that serves models on one GPU and on two, which are its own.

    NEEDS="" PARTS=0 GPUS=2 END=1500 lease.sh tp_jobs 580

The first call of several. At home, in a directory with rows.jsonl and run.json of the last one:

    python -m benchmarks.engines.whole_model report . RESULT.json
"""

import json

from benchmarks.real_models.lease_jobs import job

# NVLink multicast stays off: it can put GPUs that others share out of service.
_COMMAND = (
    "NCCL_NVLS_ENABLE=0 VLLM_ALLREDUCE_USE_SYMM_MEM=0 "
    "python3 -m benchmarks.engines.whole_model run $RESULTS --two-gpus --commit $COMMIT"
)

if __name__ == "__main__":
    # lease.sh shows the end of the log of a job of this name.
    print(json.dumps([job("compare", _COMMAND, 600, gpu=False) | {"limit": 1e6}], indent=1))
