"""The daemon: device opens as they happen, samples, judgements, findings with a life, sinks."""
