"""Load tests of OpenAI-compatible LLM servers: open loop, replayable, self-checking.

traffic/generate.py turns a scenario (scenarios/*.yaml) into a schedule, which is a file.
locustfile.py replays the schedule against a server and writes one record per request.
report/report.py reads the records of one or more runs. `python -m loadtest --help` lists the steps.
"""
