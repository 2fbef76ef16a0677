"""The commands of ``tollgate``, one module per thing that is operated on."""
