"""How much memory and time a checkpoint takes on which hardware: ``tollgate plan``."""
