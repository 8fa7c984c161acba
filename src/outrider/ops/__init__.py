"""Operations of any engine: planning, diagnosis, deployment, guard, alerts."""
