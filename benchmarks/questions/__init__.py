"""One module per question: its cases, and the contenders of stallfree and torch."""
