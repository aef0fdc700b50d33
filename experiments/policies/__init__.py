"""All policies on the same loads."""
