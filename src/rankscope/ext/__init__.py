"""Extensions that come with rankscope; each folder can be deleted, and nothing outside imports it."""
