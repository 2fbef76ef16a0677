"""What all dialects share: callers, bodies, answers, streams, and the guards of the door."""
