"""Names of other runtimes, over this package's operations. Nothing here is imported by default."""
