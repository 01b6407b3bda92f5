"""From a ProbeSpec to a ProbeOutcome: processes, metrics, classification."""
