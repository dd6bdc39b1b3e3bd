"""Forward and backward as one functional program, and what it must honour."""
