"""Re-scoring of given tokens with torch: plan, run the body, reduce over the vocabulary."""
