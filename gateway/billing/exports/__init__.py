"""Receipts and refunds as files: CSV and Parquet, in the native and the FOCUS profile."""
