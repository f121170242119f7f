"""The stages of a run, one module each: python -m jobs.<stage> --config FILE [key=value ...]."""
