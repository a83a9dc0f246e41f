"""Load tests of OpenAI-compatible LLM servers: open loop, replayable, and honest about themselves.

The way of the data: a scenario (scenarios/*.yaml) becomes a schedule (traffic.py), which is a file;
locustfile.py replays it against a server and writes one record per request; report.py reads the
records of one or many runs. `python -m loadtest --help` lists the steps.
"""
