"""Engine of ``talking-head``: animates portraits by recordings of speech."""
