"""What happens in one fit, validate, test or predict."""
