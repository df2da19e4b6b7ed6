"""The paper's figures, simulated, beside the paper's numbers (`make figures`)."""
