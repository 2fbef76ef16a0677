"""Archives: closed months moved out of the database into Parquet files, and back."""
