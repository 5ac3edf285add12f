"""Any checkpoint layout -> a torch module in eval mode."""
