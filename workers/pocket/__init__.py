"""The small models that Tollgate ships: weights and cards only."""
