"""From pairs of answers to labels: store, synthesis, annotation, selection and costs."""
