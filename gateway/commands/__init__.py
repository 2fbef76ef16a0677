"""The commands of ``tollgate``, which adapt ``gateway.operations`` to the command line."""
