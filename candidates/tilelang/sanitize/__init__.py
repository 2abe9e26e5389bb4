"""compute-sanitizer over the operators, and over programs with an error in them."""
