"""What ``exactspec bench`` does: it measures the operation and the decode loop beside peers."""
