"""Everything that trains and scores the models that Tollgate ships. Not part of the package."""
